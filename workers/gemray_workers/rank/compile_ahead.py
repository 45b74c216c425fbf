"""What a rank's warm-up and graphs will launch, compiled before the first launch and on all cores.

Which programs these are follows from shapes, dtypes and alignments alone. So cycles of every shape are rehearsed on
torch's fake tensors, which have no memory, and launches are only noted: nothing reaches the card, no rank waits for
another, and nothing of the rank changes. What a rehearsal misses is compiled at its first launch, as ever: what
log-probabilities and grammars add, and the cycles of a dedicated drafter.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_workers.engine.buckets import bucket
from gemray_workers.engine.build import EngineParts
from gemray_workers.execution.cycle_rows import CyclePlan, CycleShape
from gemray_workers.execution.programs_ahead import (
    Program,
    compile_side_by_side,
    launches_compile,
    noted_programs,
)
from gemray_workers.execution.slots import SlotTable
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.graph_buckets import graph_buckets
from gemray_workers.rank.largest_step import DEAREST
from gemray_workers.rank.warm_up import requests_of
from gemray_workers.sampling.features import Features

logger = logging.getLogger(__name__)

MOST_THREADS = 16
"""Threads of a rank that compile: about a tenth of a compilation holds Python's lock."""


@dataclass(frozen=True)
class Rehearsal:
    """What the cycles of one target rank are rehearsed on."""

    blueprint: Blueprint
    device: torch.device
    build_slots: Callable[[], SlotTable]
    """Slots for the rehearsal alone: they keep what they are given."""
    parts: Callable[[SlotTable], EngineParts]
    """The rank's own over such slots."""
    one_layer_a_kind: Callable[[], AbstractContextManager[None]]
    """Has the rank's model run no more layers than launch different programs."""
    silenced: Callable[[], AbstractContextManager[None]]
    """Keeps the rank's communicator from exchanging anything meanwhile."""

    def programs(self, plans: Sequence[CyclePlan]) -> list[Program]:
        """The programs that cycles of these plans launch and that the process has not compiled."""
        with (
            warnings.catch_warnings(),
            self.one_layer_a_kind(),  # which looks at all weights: of packed experts a minute where tensors are fake
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.inference_mode(),
            self.silenced(),
        ):
            warnings.simplefilter("ignore")  # a fake tensor's address is only looked at for its alignment
            slots = self.build_slots()
            parts = self.parts(slots)
            with noted_programs() as programs:
                failures = [error for plan in plans if (error := self._run(plan, slots, parts)) is not None]
        if failures:
            logger.info("%d of %d cycles could not be rehearsed: %s", len(failures), len(plans), failures[0])
        return programs

    def _run(self, plan: CyclePlan, slots: SlotTable, parts: EngineParts) -> str | None:
        """Note what one cycle launches; what kept it from its end, if anything did."""
        cycle = parts.cycle()
        try:
            slots.sampling.reserve(plan.features)
            table_S6 = plan.table(slots.null_slot).to(self.device)
            cycle.draft(plan, table_S6)
            cycle.decide(plan, table_S6)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None


def compile_ahead(rehearsal: Rehearsal, *, rank: int, ranks_here: int) -> None:
    """Compile what the rank will launch, and say in a line of the log how much that was. It never raises.

    Where the first plans' programs all are in Triton's cache on disk, so will be the others, and it ends at once.

    Args:
        rehearsal: of the rank.
        rank: its number.
        ranks_here: ranks of the gang on this host, which share its cores, and the work where they share a cache.
    """
    threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks_here))
    compiled = found = 0
    seconds = 0.0
    try:
        for plans in plans_ahead(rehearsal.blueprint) if launches_compile() else ():
            programs = rehearsal.programs(plans)
            result = compile_side_by_side(
                programs, threads, part=rank % ranks_here, parts=ranks_here, bind=lambda: _bind(rehearsal.device)
            )
            for failure in result.failures:
                logger.warning("not compiled ahead, will be tried again at its first launch: %s", failure)
            compiled, found = compiled + result.num_compiled, found + result.num_found
            seconds += result.seconds
            if not result.num_compiled:
                break
    except Exception:
        logger.warning("programs are compiled at their first launch: none could be ahead of it", exc_info=True)
    logger.info(
        "compiled %d programs ahead on %d threads in %.1f s, found %d in the cache", compiled, threads, seconds, found
    )


def _bind(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def plans_ahead(blueprint: Blueprint) -> list[list[CyclePlan]]:
    """Plans whose cycles launch what a start does: a few that have most kernels between them, then the others."""
    graphs = _captured_plans(blueprint) if blueprint.why_eager() is None else []
    eager = list(_eager_plans(blueprint))
    first: dict[Features, CyclePlan] = {}
    for plan in graphs:
        first.setdefault(plan.features, plan)
    few = [*first.values(), *eager[:1]]
    return [few, [plan for plan in (*graphs, *eager) if plan not in few]]


def _captured_plans(blueprint: Blueprint) -> list[CyclePlan]:
    """Those of the graphs, each shape with the most that is captured for it: features decide on the choice's kernels
    alone. Of these Triton compiles one program for a single row, one for a multiple of 16 and one for other numbers,
    so all features are there with each of those."""
    keys = graph_buckets(blueprint)
    most: dict[CycleShape, Features] = {}
    for shape, features in keys:
        most[shape] = most.get(shape, features) | features
    plans: list[CyclePlan] = []
    seen: set[tuple[Features, bool, bool]] = set()
    for shape, features in keys:
        num_rows = shape.num_choosing * (1 + shape.max_drafts)
        kind = features, num_rows == 1, num_rows % 16 == 0
        if features == most[shape] or kind not in seen:
            seen.add(kind)
            plans.append(CyclePlan([], shape, features))
    return plans


def _eager_plans(blueprint: Blueprint) -> Iterator[CyclePlan]:
    """The largest step's, then those of the warm-up's requests."""
    scheduler = blueprint.scheduler
    most = [member.num_draft_tokens for member in blueprint.drafter.members]
    largest = bucket(scheduler.max_num_seqs, most, scheduler.prefill_chunk, scheduler.max_step_tokens)
    dearest = Features.of(DEAREST).in_few_programs()
    yield CyclePlan([], _with_keys(largest), dearest)
    yield CyclePlan([], bucket(scheduler.max_num_seqs, most), dearest)
    for features, rows in dict.fromkeys(
        (Features.of(submit.params).in_few_programs(), min(len(submit.prompt_ids), scheduler.prefill_chunk))
        for submit in requests_of(blueprint)
    ):
        yield CyclePlan([], _with_keys(bucket(1, (), rows)), features)
        yield CyclePlan([], bucket(1, most), features)


def _with_keys(shape: CycleShape) -> CycleShape:
    """The shape as the host plans it where it knows that the prompt's chunk is its first."""
    return replace(shape, most_keys=shape.most_rows if shape.most_rows > FEW_ROWS else 0)
