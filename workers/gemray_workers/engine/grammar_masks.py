"""Masks of the rows that follow a grammar or have bad words, made while the target runs over those rows.

Rank 0 alone makes them: it is told the tokens anyway, a grammar is compiled once, and ranks cannot come to differ.
It reads the drafts, looks along them, and sends one bit an id and row to the target's other ranks (32 KiB a row of
Gemma's vocabulary). The drafts leave the device before the forward pass is enqueued and the masks enter it behind that:
a device computes meanwhile, and waits only for masks that take longer than the pass.

Shape legend: G rows with a mask, W 32-bit words of the vocabulary's bits.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor

from gemray_workers.engine.planner import Planner
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.execution.host_copy import HostResult, to_device
from gemray_workers.execution.slots import SlotTable
from gemray_workers.grammar.run import Words
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.sampling.row_masks import MakeMasks, RowMasks
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

    def begin(self, cycle: CyclePlan) -> MakeMasks | None:
        """Let the drafts leave the device; None when no row of the rectangle has a mask.

        Returns what makes the masks. It waits for the drafts on rank 0, and for rank 0 on the others.

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
        places = [c * width + i for c, r in constrained for i in range(1 + r.num_drafts)]
        rows = [r for _, r in constrained]
        drafts = HostResult(self._drafts(rows)) if self._comm.rank == 0 else None
        return partial(self._masks, places, rows, drafts)

    def _masks(self, places: list[int], rows: list[ScheduledRows], drafts: HostResult | None) -> RowMasks:
        """Those of the rectangle's rows at `places`."""
        payload = self._comm.broadcast_bytes(None if drafts is None else self._allowed(rows, drafts).tobytes())
        allowed_GW = np.frombuffer(payload, dtype=np.uint32).reshape(len(places), -1)
        return RowMasks.of_ids(places, allowed_GW, self._slots.sampling.shard, self._slots.device)

    def _allowed(self, rows: list[ScheduledRows], drafts: HostResult) -> Words:
        """[G, W] on rank 0."""
        ids = iter(drafts.values())
        return np.concatenate(
            [self._planner.allowed(r.slot, [next(ids) for _ in range(r.num_drafts)], self._num_words) for r in rows]
        )

    def _drafts(self, rows: list[ScheduledRows]) -> Tensor | None:
        """What was drafted for each, one behind the other. Where a sequence has no room for them the ids are stale, and
        so are their rows' masks; no token is taken from these."""
        cells = [(r.slot, r.start + r.num_known + i) for r in rows for i in range(r.num_drafts)]
        if not cells:
            return None
        slot_D, position_D = to_device(list(zip(*cells, strict=True)), self._slots.device)
        return self._slots.token_ids_NL[slot_D, position_D]
