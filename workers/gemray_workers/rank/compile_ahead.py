"""What a rank's warm-up and graphs will launch, compiled before the first launch and on all cores.

Which programs these are follows from shapes, dtypes and alignments alone. So cycles of every shape are rehearsed on
torch's fake tensors, which have no memory, and launches are only noted: nothing reaches the card, no rank waits for
another, and nothing of the rank changes. What a rehearsal misses, what log-probabilities and grammars add, is compiled
at its first launch, in the warm-up.

The cycles that no graph holds are rehearsed at each start, whatever is on disk: the warm-up runs but a few of their
shapes (`eager_shapes`), and a program that is only read from disk while requests run holds them up as well.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_workers.engine.buckets import GREEDY, bucket
from gemray_workers.engine.build import EngineParts
from gemray_workers.engine.outcomes import PROMPT_LOGPROB_ROWS
from gemray_workers.execution.cycle_rows import CyclePlan, CycleShape
from gemray_workers.execution.programs_ahead import (
    Program,
    compile_side_by_side,
    launches_compile,
    noted_programs,
)
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.eager_shapes import eager_shapes
from gemray_workers.rank.graph_buckets import graph_buckets
from gemray_workers.rank.largest_step import DEAREST
from gemray_workers.rank.lasting_fakes import lasting_fakes
from gemray_workers.rank.warm_up import requests_of
from gemray_workers.sampling.features import Features

logger = logging.getLogger(__name__)

MOST_THREADS = 16
"""Threads of a rank that compile: about a quarter of a compilation is Python, which one at a time runs."""


@dataclass(frozen=True)
class Rehearsal:
    """What the cycles of one rank are rehearsed on."""

    rank: int
    blueprint: Blueprint
    device: torch.device
    stage: Callable[[], Callable[[CyclePlan], None]]
    """Gives what runs a plan's cycle, over slots for the rehearsal alone: they keep what they are given."""
    one_layer_a_kind: Callable[[], AbstractContextManager[None]]
    """Has the rank's model run no more layers than launch different programs."""
    silenced: Callable[[], AbstractContextManager[None]]
    """Keeps the rank's communicator from exchanging anything meanwhile."""

    def programs(self, plans: Sequence[CyclePlan]) -> list[Program]:
        """The programs that cycles of these plans launch and that the process has not compiled."""
        with (
            warnings.catch_warnings(),
            self.one_layer_a_kind(),  # which looks at all weights: of packed experts a minute where tensors are fake
            lasting_fakes(),
            torch.inference_mode(),
            self.silenced(),
        ):
            warnings.simplefilter("ignore")  # a fake tensor's address is only looked at for its alignment
            run = self.stage()
            with noted_programs() as programs:
                failures = [error for plan in plans if (error := _failure(run, plan)) is not None]
        if failures:
            logger.info("%d of %d cycles could not be rehearsed: %s", len(failures), len(plans), failures[0])
        return programs


def _failure(run: Callable[[CyclePlan], None], plan: CyclePlan) -> str | None:
    """What kept a cycle from its end, if anything did."""
    try:
        run(plan)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def target_stage(parts: EngineParts) -> Callable[[CyclePlan], None]:
    """What runs a target's cycle over these parts, and scores rows beside those that choose, where there are some, as
    prompt log-probabilities do. Drafts that follow from what earlier ones did are passed over: they launch the same."""
    cycle, slots = parts.cycle(), parts.slots
    drafted: set[object] = set()

    def run(plan: CyclePlan) -> None:
        shape = plan.shape
        slots.sampling.reserve(plan.features)
        table_S6 = plan.table(slots.null_slot).to(slots.device)
        draft = shape.num_sequences, shape.by_drafter, plan.features
        if draft not in drafted:
            cycle.draft(plan, table_S6)
            drafted.add(draft)
        output = cycle.decide(plan, table_S6)
        if shape.num_outputs > shape.num_choosing * (1 + shape.max_drafts):
            parts.model.logits(output.hidden_UH[:PROMPT_LOGPROB_ROWS])

    return run


def compile_ahead(rehearsal: Rehearsal, *, ranks_here: int) -> None:
    """Compile what the rank will launch, and say in a line of the log how much that was. It never raises.

    Where the first plans' programs all are in Triton's cache on disk, so will be those of the other graphs and of the
    warm-up, which will read them.

    Args:
        rehearsal: of the rank.
        ranks_here: ranks of the gang on this host, which share its cores, and the work where they share a cache.
    """
    threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks_here))
    compiled = found = 0
    seconds = 0.0
    try:
        few, others, eager = plans_ahead(rehearsal.blueprint) if launches_compile() else ([], [], [])
        for plans in (few, others, eager):
            if not plans or (plans is others and not compiled):
                continue
            programs = rehearsal.programs(plans)
            result = compile_side_by_side(
                programs,
                threads,
                part=rehearsal.rank % ranks_here,
                parts=ranks_here,
                bind=lambda: _bind(rehearsal.device),
            )
            for failure in result.failures:
                logger.warning("not compiled ahead, will be tried again at its first launch: %s", failure)
            compiled, found = compiled + result.num_compiled, found + result.num_found
            seconds += result.seconds
    except Exception:
        logger.warning("programs are compiled at their first launch: none could be ahead of it", exc_info=True)
    logger.info(
        "compiled %d programs ahead on %d threads in %.1f s, found %d in the cache", compiled, threads, seconds, found
    )


def _bind(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def plans_ahead(blueprint: Blueprint) -> tuple[list[CyclePlan], list[CyclePlan], list[CyclePlan]]:
    """Plans whose cycles launch what a start does: a few that have most kernels between them, then the others; and
    those of the cycles that no graph will hold, as they may come while requests run."""
    graphs = _captured_plans(blueprint) if blueprint.why_eager() is None else []
    eager = list(_eager_plans(blueprint))
    first: dict[Features, CyclePlan] = {}
    for plan in graphs:
        first.setdefault(plan.features, plan)
    few = [*first.values(), *eager[:1]]
    others = [plan for plan in (*graphs, *eager) if plan not in few]
    scheduler = blueprint.scheduler
    shapes = eager_shapes(
        max_num_seqs=scheduler.max_num_seqs,
        num_draft_tokens=[member.num_draft_tokens for member in blueprint.drafter.members],
        prefill_chunk=scheduler.prefill_chunk,
        max_step_tokens=scheduler.max_step_tokens,
        max_model_len=blueprint.widest.max_model_len,
        tiled_rows=_tiled_rows(blueprint),
        drafted_rows=_drafted_rows(),
        has_graphs=bool(graphs),
    )
    return few, others, [CyclePlan([], shape, GREEDY) for shape in shapes]


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


def _tiled_rows(blueprint: Blueprint) -> list[int]:
    """Numbers of a prompt's rows at which products change their tiles, and by them what is compiled, beside powers of
    two. With more rows those of plain weights are the library's in fast numerics, which drafters' always are."""
    from gemray_kernels.triton.exact_rows_tiles import ROWS  # where there is triton
    from gemray_kernels.triton.linear_ahead import AHEAD_ROWS
    from gemray_kernels.triton.linear_tiles import PROMPT_TILE_ROWS
    from gemray_kernels.triton.packed_even_choice import EVEN_ROWS

    is_exact, is_packed = blueprint.config.numerics == "exact", blueprint.model.quantization is not None
    if not is_exact and not is_packed:
        return [*AHEAD_ROWS]
    return [
        *AHEAD_ROWS,
        *(ROWS if is_exact else ()),
        *(EVEN_ROWS if is_packed else ()),
        *range(PROMPT_TILE_ROWS, blueprint.scheduler.max_step_tokens, PROMPT_TILE_ROWS),
    ]


def _drafted_rows() -> list[int]:
    """Numbers of drafters' rows at which their products, those of plain weights, change their tiles."""
    from gemray_kernels.triton.linear_ahead import ROW_TILES  # where there is triton

    return [rows + more for rows, more in ROW_TILES]


def _with_keys(shape: CycleShape) -> CycleShape:
    """The shape as the host plans it where it knows that the prompt's chunk is its first."""
    return replace(shape, most_keys=shape.most_rows if shape.most_rows > FEW_ROWS else 0)
