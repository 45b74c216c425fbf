"""A real drafter under watch: its logits in every round of a live engine, and traps around the keys it may read.

Shape legend: K drafts of a round, V vocabulary, R rows, P block-table columns, B pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gemray_workers.drafters.protocol import Drafter
from gemray_workers.execution.cycle_rows import CycleRows, PackedRows
from gemray_workers.execution.slots import SlotTable
from gemray_workers.model.batch import ForwardOutput
from gemray_workers.sampling.features import Features
from gemray_workers.sampling.state import SamplingState
from support.engine.scripted_drafters import Round, Script, ScriptedDrafter, sequences_of
from support.engine.speculation_rig import Rig
from support.oracles.oracle import whole_logits


@dataclass(frozen=True)
class WatchedRound:
    """What a real drafter computed in one sequence's round."""

    request_id: str
    start: int
    """Committed positions: where the newest token stands."""
    drafts: list[int]
    """Its own, whatever was verified in their place."""
    logits_KV: Tensor
    """Behind each of its drafts, by id."""


class LogitsSpy:
    """Stands before a drafter's `DraftChooser` and keeps the logits that go through it."""

    def __init__(self, chooser: Any, rig: Rig) -> None:
        self._chooser = chooser
        self._rig = rig
        self.logits: dict[int, list[Tensor]] = {}
        """By slot, one row a draft."""

    def choose(
        self,
        logits_RV: Tensor,
        slot_R: Tensor,
        position_R: Tensor,
        sampling: SamplingState,
        features: Features,
        softcap: float | None = None,
    ) -> Tensor:
        capped_RV = logits_RV if softcap is None else torch.tanh(logits_RV / softcap) * softcap
        for slot, row_V in zip(slot_R.tolist(), whole_logits(self._rig.model, capped_RV), strict=True):
            self.logits.setdefault(slot, []).append(row_V)
        ids_R: Tensor = self._chooser.choose(logits_RV, slot_R, position_R, sampling, features, softcap)
        return ids_R


class WatchedDrafter:
    """The drafter of `rig`, with what a script says verified instead of its drafts: so its state is driven through
    any acceptance, while its own proposals are noted.

    After each round every key that no one may read (positions from C on, and the null page) is made NaN, in the
    target's pools and in the drafter's, and the drafter must leave the target's keys as they are.
    """

    weight_bytes = 0

    def __init__(self, rig: Rig, script: Script, inner: Drafter | None = None) -> None:
        """
        Args:
            rig: whose drafter is watched.
            script: what is verified.
            inner: the drafter to watch in place of the rig's, e.g. one with a fault.
        """
        self._rig = rig
        self._drafter = cast("Any", rig.drafter)
        self._inner: Drafter = inner or rig.drafter
        self._outer = ScriptedDrafter(script, self)
        self._chooser = self._drafter._chooser
        self.rounds: list[WatchedRound] = []
        self.committed_keys: list[tuple[str, int, dict[str, Tensor]]] = []
        """(request, C, the drafter's own keys of committed positions in view, by group) after each step."""

    @property
    def outer(self) -> ScriptedDrafter:
        """The drafter to give to an engine."""
        return self._outer

    @property
    def scripted_rounds(self) -> list[Round]:
        """What was verified, and how much of it accepted."""
        return self._outer.rounds

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        spy = LogitsSpy(self._chooser, self._rig)
        self._drafter._chooser = spy
        before = _bits(self._rig.pools)
        try:
            self._inner.propose(rows, slots)
        finally:
            self._drafter._chooser = self._chooser
        after = _bits(self._rig.pools)
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True)), "drafting wrote the target's KV"
        for r in sequences_of(rows):
            if r.num_drafts:
                drafts = slots.token_ids_NL[r.slot, r.start + 1 : r.start + 1 + r.num_drafts].tolist()
                logits_KV = torch.stack(spy.logits[r.slot][: r.num_drafts])
                self.rounds.append(WatchedRound(slots[r.slot].request_id, r.start, drafts, logits_KV))

    def commit(
        self, rows: CycleRows, packed: PackedRows, slots: SlotTable, output: ForwardOutput, accepted_A: Tensor
    ) -> None:
        self._inner.commit(rows, packed, slots, output, accepted_A)
        for r, n in zip(sequences_of(rows), accepted_A.tolist(), strict=False):
            committed = r.start + r.num_known + n
            self._note_keys(r.slot, committed, slots)
            self._poison_behind(r.slot, committed, slots)

    def reset(self, slot: int) -> None:
        self._inner.reset(slot)

    def _note_keys(self, slot: int, committed: int, slots: SlotTable) -> None:
        if self._rig.drafter_pools is None:
            return
        keys = {}
        for spec in self._rig.plan.kv_specs:
            first = 0 if spec.window is None else max(0, committed - spec.window)
            at = torch.arange(first, committed)
            pages = slots.block_tables_NP[spec.name][slot][at // spec.page_size].long()
            k_pages = self._rig.drafter_pools.caches.reader(spec.layers[0]).k_pages
            keys[spec.name] = k_pages[pages, at % spec.page_size]
        self.committed_keys.append((slots[slot].request_id, committed, keys))

    def _poison_behind(self, slot: int, committed: int, slots: SlotTable) -> None:
        for spec in self._rig.specs:
            pools = self._rig.pools if spec.name in self._rig.target_groups else self._rig.drafter_pools
            assert pools is not None
            table_P = slots.block_tables_NP[spec.name][slot]
            at = torch.arange(committed, len(table_P) * spec.page_size)
            pages = table_P[at // spec.page_size].long()
            for layer in spec.layers:
                reader = pools.caches.reader(layer)
                for pages_B in (reader.k_pages, reader.v_pages):
                    pages_B[pages, at % spec.page_size] = torch.nan
                    pages_B[0] = torch.nan


def _bits(pools: Any) -> list[Tensor]:
    """All pages, as integers: NaN equals itself."""
    pairs = pools._pages_BPND.values()
    return [tensor.view(torch.int64).clone() for pair in pairs for tensor in pair]


class Faulty:
    """A drafter with a fault: what it is given is changed first."""

    weight_bytes = 0

    def __init__(
        self,
        inner: Drafter,
        *,
        slots: Callable[[SlotTable], Any] = lambda slots: slots,
        num_accepted: Callable[[CycleRows, Tensor], Tensor] = lambda _rows, n: n,
    ) -> None:
        """
        Args:
            inner: a sound drafter.
            slots: the table it sees when it proposes.
            num_accepted: how many drafts it is told were accepted.
        """
        self._inner = inner
        self._slots = slots
        self._num_accepted = num_accepted

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        self._inner.propose(rows, self._slots(slots))

    def commit(
        self, rows: CycleRows, packed: PackedRows, slots: SlotTable, output: ForwardOutput, accepted_A: Tensor
    ) -> None:
        self._inner.commit(rows, packed, slots, output, self._num_accepted(rows, accepted_A))

    def reset(self, slot: int) -> None:
        self._inner.reset(slot)


class OtherTables:
    """A slot table in which each group has another group's block table."""

    def __init__(self, slots: SlotTable, instead: Mapping[str, str]) -> None:
        self._slots = slots
        self._instead = instead

    def pages(self, groups: Sequence[str]) -> Any:
        return self._slots.pages([self._instead.get(name, name) for name in groups])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)

    def __getitem__(self, slot: int) -> Any:
        return self._slots[slot]
