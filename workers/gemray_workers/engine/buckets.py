"""Which shapes of cycles are captured as graphs, and which of them a plan runs in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_workers.execution.cycle_rows import CyclePlan, CycleShape, DraftShape
from gemray_workers.sampling.features import CANDIDATE_COUNTS, Features

MOST_PROMPT_ROWS = 512
"""Longer chunks run eagerly: their kernels take longer than their launches."""

CAPTURED_FEATURES = (Features(), Features(candidates=CANDIDATE_COUNTS[0], masks=True))
"""Greedy requests alone, and what the published defaults ask for (T 1, top_k 64, top_p 0.95, forbidden ids). Batches
that ask for more (penalties, bias, no top_k) run eagerly."""


def buckets(*, max_num_seqs: int, num_draft_tokens: Sequence[int], prompt_rows: Sequence[int]) -> list[CycleShape]:
    """Every bucket that is captured, largest first.

    Args:
        max_num_seqs: sequences at one time: powers of two up to it, and itself.
        num_draft_tokens: most drafts of a sequence, by drafter: none, half of each one's, all of each one's, and all of
            all in one cycle.
        prompt_rows: room for prompt chunks beside the sequences' own rows; 0 among them.
    """
    sizes = sorted({*(1 << i for i in range(max_num_seqs.bit_length()) if 1 << i < max_num_seqs), max_num_seqs})
    drafts = {(), tuple(num_draft_tokens)}
    for drafter, most in enumerate(num_draft_tokens):
        drafts |= {(*(0,) * drafter, k) for k in (most // 2, most)}
    shapes = dict.fromkeys(bucket(size, k, rows) for size in sizes for k in sorted(drafts) for rows in prompt_rows)
    return sorted(shapes, key=lambda shape: -shape.num_rows)


def bucket(num_sequences: int, num_drafts: Sequence[int], prompt_rows: int) -> CycleShape:
    """Room for `num_sequences` sequences that all draft and choose, and for prompt rows beside them. With several
    drafters any of them may draft for each sequence, as many tokens as `num_drafts` says of it.
    """
    most = max(num_drafts, default=0)
    rows = num_sequences * (1 + most)
    # The limit up to which attention needs one kernel less, or more if the drafts need more.
    most_own = max(1 + most, min(rows, FEW_ROWS))
    return CycleShape(
        num_sequences=num_sequences,
        num_drafting=num_sequences if most else 0,
        num_choosing=num_sequences,
        max_drafts=most,
        num_rows=rows + prompt_rows,
        most_rows=rows + prompt_rows if prompt_rows else most_own,
        num_block_rows=rows if most else 0,
        num_outputs=rows,
        most_outputs=most_own,
        drafters=tuple(DraftShape(num_sequences, k, num_sequences * (1 + k)) if k else DraftShape() for k in num_drafts)
        if any(num_drafts[1:])
        else (),
    )


def smallest(shape: CycleShape, among: Iterable[CycleShape]) -> CycleShape | None:
    """The bucket with the fewest rows, then sequences, then drafts of all drafters, that holds a plan of `shape`; None
    when none does."""
    return min(
        (b for b in among if b.holds(shape)),
        key=lambda b: (b.num_rows, b.num_sequences, sum(part.max_drafts for part in b.by_drafter)),
        default=None,
    )


def fit(plan: CyclePlan, captured: Collection[tuple[CycleShape, Features]]) -> CyclePlan:
    """The plan in the smallest captured shape that holds it, with features that cover its own; unchanged if none do."""
    enough = [features for _, features in captured if features.covers(plan.features)]
    if not enough:
        return plan
    shape = smallest(plan.shape, {shape for shape, features in captured if features == enough[0]})
    return plan if shape is None else replace(plan, shape=shape, features=enough[0])
