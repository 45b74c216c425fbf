"""What a row is held against: another engine's time for the same work, its floor, gemray's bar and target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gemray_cluster.bench.report import PrefillRow, Row
from gemray_cluster.bench.suites import read_toml
from gemray_workers.errors import InvalidField

Key = tuple[str, int, str, int, int, str]
"""Model, ranks, method, drafts, batch, sampling."""


@dataclass(frozen=True)
class Peer:
    """Figures of one row, in milliseconds a cycle; None is unknown."""

    peer_ms: float | None = None
    floor_ms: float | None = None
    bar_ms: float | None = None
    """What is asked for."""
    target_ms: float | None = None
    """What is aimed at beyond it."""


@dataclass(frozen=True)
class Peers:
    """Figures by the work that they are of."""

    decode: Mapping[Key, Peer]
    prefill: Mapping[tuple[str, int], float]
    """By model and ranks: most times the floor that are asked for."""

    def of(self, row: Row) -> Peer:
        """The figures of the same work; all unknown where there are none."""
        return self.decode.get((row.model, row.tp, row.method, row.draft_tokens, row.batch, row.sampling), Peer())

    def bar_of(self, row: PrefillRow) -> float | None:
        """Times its floor that a prompt may take; None where nothing is asked."""
        return self.prefill.get((row.model, row.tp))


def read_peers(path: Path | None) -> Peers | None:
    """From a TOML file of ``[[peer]]`` and ``[[prefill]]`` tables; None without a file. Raises InvalidField."""
    if path is None:
        return None
    content = read_toml("peers", path)
    try:
        decode = {
            (p["model"], p["tp"], p["method"], p["draft_tokens"], p["batch"], p.get("sampling", "greedy")): Peer(
                p.get("peer_ms"), p.get("floor_ms"), p.get("bar_ms"), p.get("target_ms")
            )
            for p in content.get("peer", [])
        }
        return Peers(decode, {(p["model"], p["tp"]): p["bar_x_floor"] for p in content.get("prefill", [])})
    except KeyError as error:
        raise InvalidField("peers", str(path), f"tables that each have {error.args[0]}") from None
    except (TypeError, AttributeError):
        raise InvalidField("peers", str(path), "[[peer]] and [[prefill]] tables of texts and numbers") from None
