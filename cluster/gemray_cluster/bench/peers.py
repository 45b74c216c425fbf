"""What a row is held against: another engine's time for the same work, its floor, gemray's bar and target.

Milliseconds are of one kind of card. A row of another card is held against multiples of the floor instead: a card that
reads faster beside the same multiprocessors meets milliseconds with ease, and multiples with more effort.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from gemray_cluster.bench.names import check_names
from gemray_cluster.bench.report import PrefillRow, Row
from gemray_cluster.bench.suites import read_toml
from gemray_workers.errors import InvalidField

Key = tuple[str, int, str, int, int, str]
"""Model, ranks, method, drafts, batch, sampling."""
Met = Literal["target", "bar", "no"]
TableT = TypeVar("TableT")


@dataclass(frozen=True)
class Peer:
    """Figures of one row, in milliseconds a cycle; None is unknown."""

    peer_ms: float | None = None
    floor_ms: float | None = None
    bar_ms: float | None = None
    """What is asked for."""
    target_ms: float | None = None
    """What is aimed at beyond it."""
    bar_x_floor: float | None = None
    """Times the floor that are asked for, on any card."""


@dataclass(frozen=True)
class Limit:
    """A time that a row is held against, in milliseconds or in times the floor."""

    value: float
    in_floors: bool

    def holds(self, row: Row) -> bool:
        """Whether the row keeps it."""
        return (row.step.median / row.floor.stated_ms if self.in_floors else row.step.median) <= self.value

    def __str__(self) -> str:
        return f"{self.value:.2f} x floor" if self.in_floors else f"{self.value:g} ms"


@dataclass(frozen=True)
class Verdict:
    """A row beside its figures."""

    peer: Peer
    peer_x_floor: float | None
    bars: tuple[Limit, ...]
    """All of them are asked for."""
    target: Limit | None
    met: Met | None
    """None where there is neither bar nor target."""


@dataclass(frozen=True)
class Peers:
    """Figures by the work that they are of."""

    decode: Mapping[Key, Peer]
    prefill: Mapping[tuple[str, int], float]
    """By model and ranks: most times the floor that are asked for."""
    device: str = ""
    """How the names of cards begin that milliseconds are of; empty for any."""
    bandwidth: float | None = None
    """Bytes a second that such a card reads."""

    def is_of(self, row: Row) -> bool:
        """Whether the milliseconds are of the row's card."""
        return row.device.startswith(self.device)

    def judge(self, row: Row) -> Verdict:
        """Hold a row against the figures of the same work; all unknown where there are none."""
        key = (row.model, row.tp, row.method, row.draft_tokens, row.batch, row.sampling)
        peer = self.decode.get(key, Peer())
        bar, target = self._limit(peer.bar_ms, peer, row), self._limit(peer.target_ms, peer, row)
        bars = [] if bar is None else [bar]
        if peer.bar_x_floor is not None:
            bars.append(Limit(peer.bar_x_floor, in_floors=True))
        return Verdict(peer, self._x_floor(peer.peer_ms, peer, row), tuple(bars), target, _met(row, bars, target))

    def bar_of(self, row: PrefillRow) -> float | None:
        """Times its floor that a prompt may take; None where nothing is asked."""
        return self.prefill.get((row.model, row.tp))

    def _limit(self, ms: float | None, peer: Peer, row: Row) -> Limit | None:
        if self.is_of(row):
            return None if ms is None else Limit(ms, in_floors=False)
        times = self._x_floor(ms, peer, row)
        return None if times is None else Limit(times, in_floors=True)

    def _x_floor(self, ms: float | None, peer: Peer, row: Row) -> float | None:
        """Such a time in multiples of the floor on the peer's card: of the peer's floor, or of ours if that is more."""
        if ms is None or peer.floor_ms is None:
            return None
        bytes_read = row.floor.target_bytes + row.floor.drafter_bytes
        ours_ms = 0.0 if self.bandwidth is None else 1000 * bytes_read / self.bandwidth
        return ms / max(peer.floor_ms, ours_ms)


def _met(row: Row, bars: list[Limit], target: Limit | None) -> Met | None:
    if target is not None and target.holds(row) and all(bar.holds(row) for bar in bars):
        return "target"
    if bars and all(bar.holds(row) for bar in bars):
        return "bar"
    return None if target is None and not bars else "no"


@dataclass(frozen=True, kw_only=True)
class _PeerTable(Peer):
    """A ``[[peer]]`` table: figures, and the work that they are of."""

    model: str
    tp: int
    method: str
    draft_tokens: int
    batch: int
    sampling: str = "greedy"

    @property
    def key(self) -> Key:
        return self.model, self.tp, self.method, self.draft_tokens, self.batch, self.sampling


@dataclass(frozen=True)
class _PrefillTable:
    """A ``[[prefill]]`` table."""

    model: str
    tp: int
    bar_x_floor: float


@dataclass(frozen=True)
class _File:
    """What stands at the top of the file."""

    device: str = ""
    read_tb_per_s: float | None = None
    peer: Sequence[Mapping[str, Any]] = ()
    prefill: Sequence[Mapping[str, Any]] = ()


def read_peers(path: Path | None) -> Peers | None:
    """From a TOML file of ``[[peer]]`` and ``[[prefill]]`` tables; None without a file. Raises InvalidField."""
    if path is None:
        return None
    content = read_toml("peers", path)
    check_names(_File, content, str(path), table="peers.")
    file = _File(**content)
    if file.read_tb_per_s is not None and file.read_tb_per_s <= 0:
        raise InvalidField("peers.read_tb_per_s", file.read_tb_per_s, f"a number > 0 (in {path})")
    peers = _tables(_PeerTable, "peer", file.peer, path)
    prefill = _tables(_PrefillTable, "prefill", file.prefill, path)
    return Peers(
        {peer.key: peer for peer in peers},
        {(prompt.model, prompt.tp): prompt.bar_x_floor for prompt in prefill},
        file.device,
        None if file.read_tb_per_s is None else file.read_tb_per_s * 1e12,
    )


def _tables(cls: type[TableT], name: str, tables: Any, path: Path) -> list[TableT]:
    """Each of the file's tables of one name as a `cls`."""
    if not isinstance(tables, list | tuple) or not all(isinstance(table, dict) for table in tables):
        raise InvalidField(f"peers.{name}", tables, f"[[{name}]] tables (in {path})")
    for table in tables:
        check_names(cls, table, str(path), table=f"{name}.")
    return [cls(**table) for table in tables]
