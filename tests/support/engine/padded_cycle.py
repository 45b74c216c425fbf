"""Cycles in the shapes of graphs, run kernel by kernel: what padding does is seen without a card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

from gemray_workers.engine.buckets import BucketFinder, buckets
from gemray_workers.engine.cycle import CycleRunner
from gemray_workers.engine.prompt_room import PromptRoom
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.sampling.row_masks import MakeMasks

PROMPTS = PromptRoom(beside_any=40, alone=(48, 56), beside_all=(60,), step_rows=64)
"""Room as a server would have it, at a small scale."""


OutputT = TypeVar("OutputT")


class PaddedCycle(Generic[OutputT]):
    """Pads each plan as `GraphedCycle` would."""

    def __init__(
        self,
        cycle: CycleRunner[OutputT],
        *,
        max_num_seqs: int,
        num_draft_tokens: Sequence[int],
        prompts: PromptRoom = PROMPTS,
    ) -> None:
        self._cycle = cycle
        self._captured = buckets(max_num_seqs=max_num_seqs, num_draft_tokens=num_draft_tokens, prompts=prompts)
        self._finder = BucketFinder(self._captured)
        self.num_padded = 0
        self.num_eager = 0

    def fit(self, plan: CyclePlan) -> CyclePlan:
        fitted = self._finder.fit(plan)
        if (fitted.shape, fitted.features) in self._captured:
            self.num_padded += 1
        else:
            self.num_eager += 1
        return fitted

    def draft(self, plan: CyclePlan, table_S6: Tensor) -> None:
        if plan.has_drafts:
            self._cycle.draft(plan, table_S6)

    def decide(self, plan: CyclePlan, table_S6: Tensor, masks: MakeMasks | None = None) -> OutputT:
        return self._cycle.decide(plan, table_S6, masks)
