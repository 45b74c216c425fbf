"""Which shapes of cycles are captured as graphs, and which of them a plan runs in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_workers.execution.cycle_rows import CyclePlan, CycleShape
from gemray_workers.sampling.features import CANDIDATE_COUNTS, Features

MOST_PROMPT_ROWS = 512
"""Longer chunks run eagerly: their kernels take longer than their launches."""

CAPTURED_FEATURES = (Features(), Features(candidates=CANDIDATE_COUNTS[0], masks=True))
"""Greedy requests alone, and what the published defaults ask for (T 1, top_k 64, top_p 0.95, forbidden ids). Batches
that ask for more (penalties, bias, no top_k) run eagerly."""


def buckets(*, max_num_seqs: int, num_draft_tokens: int, prompt_rows: Sequence[int]) -> list[CycleShape]:
    """Every bucket that is captured, largest first.

    Args:
        max_num_seqs: sequences at one time: powers of two up to it, and itself.
        num_draft_tokens: drafts of a sequence: none, half of them, all.
        prompt_rows: room for prompt chunks beside the sequences' own rows; 0 among them.
    """
    sizes = sorted({*(1 << i for i in range(max_num_seqs.bit_length()) if 1 << i < max_num_seqs), max_num_seqs})
    drafts = sorted({0, num_draft_tokens // 2, num_draft_tokens})
    shapes = [bucket(size, k, rows) for size in sizes for k in drafts for rows in prompt_rows]
    return sorted(shapes, key=lambda shape: -shape.num_rows)


def bucket(num_sequences: int, max_drafts: int, prompt_rows: int) -> CycleShape:
    """Room for `num_sequences` sequences that all draft and choose, and for prompt rows beside them."""
    rows = num_sequences * (1 + max_drafts)
    return CycleShape(
        num_sequences=num_sequences,
        num_drafting=num_sequences if max_drafts else 0,
        num_choosing=num_sequences,
        max_drafts=max_drafts,
        num_rows=rows + prompt_rows,
        # Without prompts the limit up to which attention needs one kernel less, or more if the drafts need more.
        most_rows=rows + prompt_rows if prompt_rows else max(1 + max_drafts, min(rows, FEW_ROWS)),
        num_block_rows=rows if max_drafts else 0,
    )


def smallest(shape: CycleShape, among: Iterable[CycleShape]) -> CycleShape | None:
    """The bucket with the fewest rows, then sequences, that holds a plan of `shape`; None when none does."""
    fitting = [
        b
        for b in among
        if b.num_sequences >= shape.num_sequences
        and b.max_drafts >= shape.max_drafts
        and b.num_rows >= shape.num_rows
        and b.most_rows >= shape.most_rows
        and b.num_block_rows >= shape.num_block_rows
    ]
    return min(fitting, key=lambda b: (b.num_rows, b.num_sequences, b.max_drafts), default=None)


def fit(plan: CyclePlan, captured: Collection[tuple[CycleShape, Features]]) -> CyclePlan:
    """The plan in the smallest captured shape that holds it, with features that cover its own; unchanged if none do."""
    enough = [features for _, features in captured if features.covers(plan.features)]
    if not enough:
        return plan
    shape = smallest(plan.shape, {shape for shape, features in captured if features == enough[0]})
    return plan if shape is None else replace(plan, shape=shape, features=enough[0])
