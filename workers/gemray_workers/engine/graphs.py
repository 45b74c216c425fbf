"""Cycles as CUDA graphs: one pair (draft, decide) for each bucket of shapes, all captured before the first request.

A bucket has room for a number of sequences, drafts and prompt rows; a plan runs in the smallest that holds it, and what
it leaves empty belongs to the null slot, which no cycle changes. A plan that no bucket holds (a long prompt chunk) runs
eagerly, over the same memory. Replays read one small table, so the host's part of a cycle is a copy and two launches.

The smallest graph that holds a plan without drafts may have room for them: a prompt's end finds the few rows that it
needs in one of a batch that drafts. Then its draft half is not replayed, on any rank, as all have the same plan.

A drafter on a rank of its own captures its half of the same buckets in the same order, and replays the bucket that the
target replays: what crosses between them has the bucket's shapes, and is sent and received inside the graphs.

All graphs live in the memory of the largest, outputs among it: what a cycle gives is read, or on its way to the host,
before the next cycle is enqueued (`Engine.step`). Logits that each graph kept for itself would be a MiB a row at a
vocabulary of 262,144, gigabytes with drafts.

Shape legend: A sequences and the null slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from gemray_workers.engine.buckets import BucketFinder, Key
from gemray_workers.engine.cycle import CycleOutput, CycleRunner
from gemray_workers.engine.unowned import unowned
from gemray_workers.execution.compiled_programs import compiled_programs
from gemray_workers.execution.cycle_rows import CyclePlan, CycleShape
from gemray_workers.sampling.features import Features
from gemray_workers.sampling.row_masks import MakeMasks

OutputT = TypeVar("OutputT")


@dataclass(frozen=True)
class _Captured(Generic[OutputT]):
    """One bucket's graphs and the memory they read and write."""

    plan: CyclePlan
    table_S6: Tensor
    draft: torch.cuda.CUDAGraph | None
    decide: torch.cuda.CUDAGraph
    output: OutputT


@dataclass
class Captures:
    """What capturing has cost a rank."""

    count: int = 0
    """Buckets."""
    seconds: float = 0.0
    """Without compiling the programs that were missing."""


class GraphedCycle(Generic[OutputT]):
    """A cycle whose buckets are replayed."""

    def __init__(
        self,
        cycle: CycleRunner[OutputT],
        keys: Sequence[Key],
        *,
        null_slot: int,
        device: torch.device,
        captures: Captures,
        give_up: Callable[[OutputT], OutputT],
    ) -> None:
        """For the buckets and features of `keys`; each is captured by `capture`, or when a plan first fits it.
        `captures` is told what that costs. `give_up` makes of an output one whose large tensors the next capture may
        write over.
        """
        self._cycle = cycle
        self._keys = tuple(keys)
        self._finder = BucketFinder(self._keys)
        self._null_slot = null_slot
        self._device = device
        self._captures = captures
        self._give_up = give_up
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: libraries keep work space for each stream that they have seen.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._captured: dict[Key, _Captured[OutputT]] = {}

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture all, the largest first, so that the others live in its memory.

        Every rank captures the same ones in the same order: collectives are among what is captured.
        """
        for i, key in enumerate(self._keys):
            self._captured[key] = self._capture(*key)
            if progress is not None:
                progress(i + 1, len(self._keys))

    @property
    def num_buckets(self) -> int:
        """Buckets, each with each of its features."""
        return len(self._keys)

    @property
    def num_kinds(self) -> int:
        """Different features among the buckets."""
        return len({features for _, features in self._keys})

    @torch.inference_mode()
    def capture_some(self, first: int, count: int) -> int:
        """Capture up to `count` buckets from the `first` one on, and say how many. The largest of each kind of features
        comes first: it is what takes the memory that the others share. Then they come by size.
        """
        keys = self._largest_first[first : first + count]
        for key in keys:
            self._captured[key] = self._capture(*key)
        return len(keys)

    @property
    def _largest_first(self) -> list[Key]:
        largest: dict[Features, Key] = {}
        for key in self._keys:
            largest.setdefault(key[1], key)
        return list(dict.fromkeys([*largest.values(), *self._keys]))

    def fit(self, plan: CyclePlan) -> CyclePlan:
        """The plan in the shape of the bucket that holds it; when it will run eagerly, as `Cycle.fit` has it."""
        fitted = self._finder.fit(plan)
        if fitted is plan:
            return self._cycle.fit(plan)
        key = fitted.shape, fitted.features
        if key not in self._captured:
            self._captured[key] = self._capture(*key)
        return fitted

    def draft(self, plan: CyclePlan, table_S6: Tensor) -> None:
        """As `Cycle.draft`."""
        captured = self._captured.get((plan.shape, plan.features))
        if captured is None:
            self._cycle.draft(plan, table_S6)
            return
        captured.table_S6.copy_(table_S6, non_blocking=True)
        if captured.draft is not None and plan.has_drafts:
            captured.draft.replay()

    def decide(self, plan: CyclePlan, table_S6: Tensor, masks: MakeMasks | None = None) -> OutputT:
        """As `Cycle.decide`, after `draft`; the output is written again by the next cycle of any bucket. Cycles with
        `masks` have no bucket: see `Features.grammar`."""
        captured = self._captured.get((plan.shape, plan.features))
        if captured is None:
            return self._cycle.decide(plan, table_S6, masks)
        captured.decide.replay()
        return captured.output

    def _capture(self, shape: CycleShape, features: Features) -> _Captured[OutputT]:
        programs = compiled_programs()
        started, compiling = time.perf_counter(), programs.seconds
        captured = self._capture_one(shape, features)
        self._captures.count += 1
        self._captures.seconds += time.perf_counter() - started - (programs.seconds - compiling)
        return captured

    def _capture_one(self, shape: CycleShape, features: Features) -> _Captured[OutputT]:
        plan = CyclePlan([], shape, features)
        table_S6 = plan.table(self._null_slot).to(self._device)
        # Once eagerly: kernels compile, and libraries take what memory they keep.
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._cycle.draft(plan, table_S6)
            self._cycle.decide(plan, table_S6)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        draft = None
        if shape.num_drafting:
            draft = torch.cuda.CUDAGraph()
            with torch.cuda.graph(draft, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                self._cycle.draft(plan, table_S6)
        decide = torch.cuda.CUDAGraph()
        with torch.cuda.graph(decide, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = self._cycle.decide(plan, table_S6)
        return _Captured(plan, table_S6, draft, decide, self._give_up(output))


def given_up(output: CycleOutput) -> CycleOutput:
    """The output of a captured cycle, whose large tensors the next capture may write over."""
    logits_RV = output.logits_RV
    return replace(
        output,
        logits_RV=None if logits_RV is None else unowned(logits_RV),
        hidden_UH=unowned(output.hidden_UH),
    )
