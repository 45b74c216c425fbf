"""Masks of the rows that follow a grammar or have bad words, between drafting and the choice of tokens.

Rank 0 alone makes them: it is told the tokens anyway, a grammar is compiled once, and ranks cannot come to differ.
It reads the drafts, looks along them, and sends one bit an id and row to the target's other ranks (32 KiB a row of
Gemma's vocabulary).

Shape legend: G rows with a mask, W 32-bit words of the vocabulary's bits.
"""

from __future__ import annotations

import numpy as np

from gemray_workers.engine.planner import Planner
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.execution.host_copy import to_device
from gemray_workers.execution.slots import SlotTable
from gemray_workers.grammar.run import Words
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.sampling.row_masks import RowMasks
from gemray_workers.scheduling.plan import ScheduledRows


class GrammarMasks:
    """Makes the masks of a cycle, on every rank of the target."""

    def __init__(self, slots: SlotTable, planner: Planner, comm: Communicator) -> None:
        """Over the target's ranks `comm`; the planner of rank 0 knows grammars and bad words."""
        self._slots = slots
        self._planner = planner
        self._comm = comm
        shard = slots.sampling.shard
        # Of every rank's ids, padding included: a rank knows its own part of the vocabulary.
        self._num_words = -(-comm.size * (shard.num_org_elements_padded + shard.num_added_elements_padded) // 32)

    def masks(self, cycle: CyclePlan) -> RowMasks | None:
        """Those of the rectangle's rows; None when no row has one. Waits for the drafts on rank 0.

        The step before must be committed: a grammar stands where the tokens do.
        """
        if not cycle.features.grammar:
            return None
        width = cycle.shape.max_drafts + 1
        constrained = [
            (c, r)
            for c, r in enumerate(cycle.scheduled[: cycle.shape.num_choosing])
            if r.samples and self._slots[r.slot].params.has_row_masks
        ]
        rows = [c * width + i for c, r in constrained for i in range(1 + r.num_drafts)]
        payload = self._comm.broadcast_bytes(
            self._allowed([r for _, r in constrained]).tobytes() if self._comm.rank == 0 else None
        )
        allowed_GW = np.frombuffer(payload, dtype=np.uint32).reshape(len(rows), -1)
        return RowMasks.of_ids(rows, allowed_GW, self._slots.sampling.shard, self._slots.device)

    def _allowed(self, constrained: list[ScheduledRows]) -> Words:
        """[G, W] on rank 0."""
        drafts = self._drafts(constrained)
        return np.concatenate(
            [
                self._planner.allowed(rows.slot, own, self._num_words)
                for rows, own in zip(constrained, drafts, strict=True)
            ]
        )

    def _drafts(self, constrained: list[ScheduledRows]) -> list[list[int]]:
        """What was drafted for each, read from the device with one wait. Where a sequence has no room for them the ids
        are stale, and so are their rows' masks; no token is taken from these."""
        cells = [(rows.slot, rows.start + rows.num_known + i) for rows in constrained for i in range(rows.num_drafts)]
        if not cells:
            return [[] for _ in constrained]
        slot_D, position_D = to_device(list(zip(*cells, strict=True)), self._slots.device)
        ids = iter(self._slots.token_ids_NL[slot_D, position_D].tolist())
        return [[next(ids) for _ in range(rows.num_drafts)] for rows in constrained]
