"""Shapes of steps that run kernel by kernel: one for each class that kernels tell apart.

Kernels are compiled for classes of row counts, and attention for how the rows lie among sequences as well (is a
sequence looked up or counted to, do its rows or the sequence number where partial results lie). A step that no graph
holds has any of them: a prompt's chunk beside penalties, a chunk beyond the graphs, a batch beside a drafter on a card
of its own. The classes end at powers of two, so that these and what lies right beside them stand for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gemray_kernels.attention_scratch import ROUND_KEYS
from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_workers.engine.buckets import bucket, decode_buckets
from gemray_workers.execution.cycle_rows import CycleShape

MOST_BLOCK_ROWS = 16
"""Most rows of one block of attention, in a step that is a block and nothing else."""


def eager_shapes(
    *,
    max_num_seqs: int,
    num_draft_tokens: Sequence[int],
    prefill_chunk: int,
    max_step_tokens: int,
    max_model_len: int,
    tiled_rows: Sequence[int],
    drafted_rows: Sequence[int],
    has_graphs: bool,
) -> list[CycleShape]:
    """Shapes that between them launch every program of steps that run kernel by kernel, however tokens are chosen.

    Args:
        max_num_seqs: sequences at one time.
        num_draft_tokens: most drafts of a sequence, by drafter.
        prefill_chunk: most prompt rows of a sequence in a step.
        max_step_tokens: most rows of a step.
        max_model_len: most tokens of a sequence.
        tiled_rows: numbers of rows at which products change their tiles, beside powers of two.
        drafted_rows: at which drafters' products do.
        has_graphs: whether batches that decode are captured, whose programs are then there.
    """
    shapes: list[CycleShape] = []
    if not has_graphs:
        shapes += decode_buckets(max_num_seqs, num_draft_tokens)
    shapes += _one_block(max_num_seqs, num_draft_tokens)
    # Further rounds of keys are the second one again.
    most_keys = min(max_model_len, 2 * ROUND_KEYS)
    shapes += _prompts(max_num_seqs, min(prefill_chunk, max_step_tokens), max_step_tokens, most_keys)
    shapes += (_long_prompts(rows, -(-rows // prefill_chunk), prefill_chunk, most_keys) for rows in tiled_rows)
    shapes += _drafted(max_num_seqs, num_draft_tokens, drafted_rows)
    return [
        shape
        for shape in dict.fromkeys(shapes)
        if shape.num_rows <= max_step_tokens and shape.num_sequences <= max_num_seqs
    ]


def _one_block(max_num_seqs: int, num_draft_tokens: Sequence[int]) -> Iterator[CycleShape]:
    """As many rows as one block of attention may hold: of a prompt, and of sequences that draft."""
    rows = 1
    while rows <= MOST_BLOCK_ROWS:
        yield _chunks(1, rows, rows)
        for drafter, most in enumerate(num_draft_tokens):
            num_seqs = -(-rows // (1 + most))
            if rows > 1 and most and num_seqs <= max_num_seqs:
                drafts = min(most, rows - 1)
                yield _with_block_rows(bucket(num_seqs, (*(0,) * drafter, drafts)), drafter, rows)
        rows *= 2


def _drafted(max_num_seqs: int, num_draft_tokens: Sequence[int], drafted_rows: Sequence[int]) -> Iterator[CycleShape]:
    """As many sequences that draft, and as many rows of sequences that draft, where there may be so many."""
    for rows in drafted_rows:
        for drafter, most in enumerate(num_draft_tokens):
            before, num_seqs = (0,) * drafter, -(-rows // (1 + most))
            if most and rows <= max_num_seqs:
                yield bucket(rows, (*before, 1))
            if most and num_seqs <= max_num_seqs:
                yield _with_block_rows(bucket(num_seqs, (*before, min(most, rows - 1))), drafter, rows)


def _with_block_rows(shape: CycleShape, drafter: int, rows: int) -> CycleShape:
    """The shape with so many rows of this drafter's blocks."""
    drafters = [replace(own, num_block_rows=rows) if i == drafter else own for i, own in enumerate(shape.drafters)]
    return replace(shape, num_block_rows=rows, drafters=tuple(drafters))


def _prompts(max_num_seqs: int, chunk: int, step_rows: int, most_keys: int) -> Iterator[CycleShape]:
    """Prompts' rows: in chunks of few rows, and with a long one among them."""
    for num_rows in _rungs(step_rows):
        most, least = min(max_num_seqs, num_rows), -(-num_rows // chunk)
        fewest = max(least, -(-num_rows // FEW_ROWS))
        if fewest <= most:
            yield _chunks(fewest, num_rows, min(num_rows, FEW_ROWS, chunk))
        # Of the slots of partial results, the null slot's among them, rows want many more than there are, or more, or
        # just so many, or leave most of them empty.
        fills = num_rows // FEW_ROWS - 1
        # What looks a sequence up is compiled for powers of two of them, the null slot among them.
        wide = [size for i in range(most.bit_length()) for size in ((64 << i) - 1, 64 << i) if size < most]
        for num_seqs in sorted({least, fills - 1, fills, *wide, most}):
            if least <= num_seqs <= most and min(chunk, num_rows - num_seqs + 1) > FEW_ROWS:
                yield _long_prompts(num_rows, num_seqs, chunk, most_keys)


def _long_prompts(num_rows: int, num_seqs: int, chunk: int, most_keys: int) -> CycleShape:
    """Rows of so many prompts, of which one has as many as it may."""
    longest = min(chunk, num_rows - num_seqs + 1)
    return replace(_chunks(num_seqs, num_rows, longest), most_keys=max(longest, most_keys))


def _rungs(most: int) -> list[int]:
    """Powers of two from `FEW_ROWS` on, what lies right above it, and `most`."""
    powers = [FEW_ROWS << i for i in range(most.bit_length())]
    return sorted({min(rows, most) for rows in (FEW_ROWS + 1, *powers)})


def _chunks(num_seqs: int, num_rows: int, most_rows: int) -> CycleShape:
    """Rows of so many sequences that draft nothing, of all of which the output is used; one chooses a token."""
    return CycleShape(
        num_sequences=num_seqs,
        num_choosing=1,
        num_rows=num_rows,
        most_rows=most_rows,
        num_outputs=num_rows,
        most_outputs=most_rows,
        most_keys=0,
    )
