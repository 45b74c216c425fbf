"""Which shapes of cycles are captured as graphs, and which of them a plan runs in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_workers.engine.prompt_room import PromptRoom
from gemray_workers.execution.cycle_rows import CyclePlan, CycleShape, DraftShape
from gemray_workers.sampling.features import CANDIDATE_COUNTS, Features

Key = tuple[CycleShape, Features]
"""What a graph is captured for."""

GREEDY = Features()
PUBLISHED = Features(candidates=CANDIDATE_COUNTS[0], masks=True)
"""What the published defaults ask for (T 1, top_k 64, top_p 0.95, forbidden ids); it covers greedy requests. Batches
that ask for more (penalties, bias, no top_k) run eagerly."""

MOST_REMEMBERED = 4096
"""Shapes of plans."""


def buckets(*, max_num_seqs: int, num_draft_tokens: Sequence[int], prompts: PromptRoom | None) -> list[Key]:
    """Every bucket that is captured, with each of the features that it is captured for, largest first.

    Args:
        max_num_seqs: sequences at one time: powers of two up to it, and itself.
        num_draft_tokens: most drafts of a sequence, by drafter: none, half of each one's, all of each one's, and all of
            all in one cycle.
        prompts: room for prompt chunks; None has buckets for decoding alone.
    """
    sizes, drafts = _sizes(max_num_seqs), _drafts(num_draft_tokens)
    shapes = decode_buckets(max_num_seqs, num_draft_tokens)
    keys = [(shape, features) for shape in shapes for features in (GREEDY, PUBLISHED)]
    if prompts is not None:
        beside = dict.fromkeys(
            bucket(size, k, prompts.beside_any, prompts.step_rows)
            for size in sizes
            for k in drafts
            if size > 1 or not any(k)
        )
        keys += [(shape, features) for shape in beside for features in (GREEDY, PUBLISHED)]
        if prompts.beside_any > FEW_ROWS:
            few = [_with_few(max_num_seqs, k, prompts.step_rows) for k in drafts if max_num_seqs > 1 or not any(k)]
            keys += [(shape, PUBLISHED) for shape in few]
        keys += [(shape, PUBLISHED) for shape in dict.fromkeys(_long(max_num_seqs, num_draft_tokens, prompts))]
        keys += [(without_choice(rows), PUBLISHED) for rows in (prompts.beside_any, *prompts.alone)]
    return sorted(keys, key=lambda key: -key[0].num_rows)


def decode_buckets(max_num_seqs: int, num_draft_tokens: Sequence[int]) -> list[CycleShape]:
    """The buckets of batches that decode; arguments as of `buckets`."""
    sizes, drafts = _sizes(max_num_seqs), _drafts(num_draft_tokens)
    return list(dict.fromkeys(bucket(size, k) for size in sizes for k in drafts))


def _sizes(max_num_seqs: int) -> list[int]:
    return sorted({*(1 << i for i in range(max_num_seqs.bit_length()) if 1 << i < max_num_seqs), max_num_seqs})


def _drafts(num_draft_tokens: Sequence[int]) -> list[tuple[int, ...]]:
    drafts = {(), tuple(num_draft_tokens)}
    for drafter, most in enumerate(num_draft_tokens):
        drafts |= {(*(0,) * drafter, k) for k in (most // 2, most)}
    return sorted(drafts)


def _with_few(max_num_seqs: int, num_drafts: Sequence[int], step_rows: int) -> CycleShape:
    """The bucket of prompts' ends, and of what follows a text found in the cache: so few rows of a sequence, beside a
    batch of any size, that attention needs one kernel less."""
    found = bucket(max_num_seqs, num_drafts, FEW_ROWS, step_rows)
    return replace(found, most_rows=max(FEW_ROWS, 1 + max(num_drafts, default=0)))


def _long(max_num_seqs: int, num_draft_tokens: Sequence[int], prompts: PromptRoom) -> Iterator[CycleShape]:
    """Buckets of longer prompts: their own rows are most of the work, so few sizes of batch will do."""
    for rows in prompts.alone:
        yield bucket(1, (), rows, prompts.step_rows)
    if max_num_seqs > 1:
        for rows in prompts.beside_all:
            for drafts in ((), tuple(num_draft_tokens)):
                yield bucket(max_num_seqs, drafts, rows, prompts.step_rows)


def bucket(
    num_sequences: int, num_drafts: Sequence[int], prompt_rows: int = 0, step_rows: int | None = None
) -> CycleShape:
    """Room for `num_sequences` sequences that all draft and choose, or for one prompt chunk and one sequence less. With
    several drafters any of them may draft for each sequence, as many tokens as `num_drafts` says of it.

    Args:
        num_sequences: at most.
        num_drafts: most drafts of a sequence, by drafter.
        prompt_rows: of the chunk; 0 for none.
        step_rows: most rows of a step; None is no limit.
    """
    most = max(num_drafts, default=0)
    own = num_sequences * (1 + most)
    rows = own
    if prompt_rows:
        # No row more than needed: products of 513 rows take a tile of rows more than those of 512.
        beside = own - (1 + most) + prompt_rows
        rows = max(own, beside if step_rows is None else min(beside, step_rows))
    # Of prompts' rows whose output is used: the limit up to which attention needs one kernel less.
    most_outputs = max(1 + most, min(own, FEW_ROWS)) if prompt_rows else 1 + most
    return CycleShape(
        num_sequences=num_sequences,
        num_drafting=num_sequences if most else 0,
        num_choosing=num_sequences,
        max_drafts=most,
        num_rows=rows,
        # Batches that decode leave no room for prompts: attention of few rows of each sequence has programs of its own.
        most_rows=rows if prompt_rows else 1 + most,
        num_block_rows=own if most else 0,
        num_outputs=own,
        most_outputs=most_outputs,
        drafters=tuple(DraftShape(num_sequences, k, num_sequences * (1 + k)) if k else DraftShape() for k in num_drafts)
        if any(num_drafts[1:])
        else (),
    )


def without_choice(prompt_rows: int) -> CycleShape:
    """Room for a chunk of one prompt that does not end with it: no layer is run for outputs alone, and no logits."""
    return CycleShape(
        num_sequences=1,
        num_choosing=0,
        num_rows=prompt_rows,
        most_rows=prompt_rows,
        num_outputs=0,
        most_outputs=0,
    )


class BucketFinder:
    """Finds which of the captured buckets a plan runs in.

    Answers are remembered: batches that decode ask the same again and again, and a search takes about as long as the
    rest of the host's part of a cycle.
    """

    def __init__(self, captured: Sequence[Key]) -> None:
        """For these buckets, whose order decides between equals."""
        self._captured = tuple(captured)
        self._find = lru_cache(MOST_REMEMBERED)(self._search)

    def fit(self, plan: CyclePlan) -> CyclePlan:
        """The plan in the smallest captured shape that holds it, with features that cover its own; unchanged if none
        do."""
        found = self._find(plan.shape, plan.features)
        return plan if found is None else replace(plan, shape=found[0], features=found[1])

    def _search(self, shape: CycleShape, features: Features) -> Key | None:
        enough = {own for own in dict.fromkeys(own for _, own in self._captured) if own.covers(features)}
        return smallest(shape, (key for key in self._captured if key[1] in enough))


def smallest(shape: CycleShape, among: Iterable[Key]) -> Key | None:
    """The bucket with the fewest rows, then sequences, then drafts of all drafters, then rows with outputs, that holds
    a plan of `shape`; the first of equals, None when none does."""
    return min(
        (key for key in among if key[0].holds(shape)),
        key=lambda key: (
            key[0].num_rows,
            key[0].num_sequences,
            sum(part.max_drafts for part in key[0].by_drafter),
            key[0].num_outputs,
        ),
        default=None,
    )
