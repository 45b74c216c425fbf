"""What an attention call leaves for its own next kernel: how much that is, and memory for it that calls share.

The keys of a decode or verify step are cut into chunks, whose sums a second kernel adds up; prompts of wide heads write
their weights for a second kernel, too. Both are hundreds of MiB in a large step, and dead when the call ends. Calls of
one stream come one after the other, captured or not: given the same memory, they need it once. Without it each call
takes its own from the allocator, which keeps one such block for graphs, one for steps that run kernel by kernel, and
another where a layer of half the heads' width has broken it.

Shape legend: R rows that may be split, N query heads, C chunks of a sequence, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gemray_kernels.reference.paged_attention import FEW_ROWS

MIN_CHUNK = 32
"""Keys of a chunk, at least."""
MAX_CHUNKS = 32
PROGRAMS_PER_ROW_BLOCK = 264
"""Enough programs for one block of rows, all KV heads together; more only add partial results."""
FEW_CALL_PAIRS = 512
"""(row, query head) pairs of a call whose programs are few, at most: what `few_attention.MOST_PROGRAMS` hold, and twice
that where sequences have so many rows that chunks hold more keys."""
PROMPT_PAIRS = 128
"""(row, query head) pairs of a block of a prompt, or a power of two with room for the query heads of a KV head."""
KEYS = 128
"""Keys of a tile of a prompt."""
ROUND_KEYS = 4096
"""Keys of a prompt's round without a window, or a multiple of it: no chunk of exact numerics lies in two rounds."""
WEIGHTS_BYTES = 1 << 30
"""Weights of a round, about; the longest that a batch may see takes fewer rounds where its rows are few."""
USUAL_PROMPT = 8192
"""Keys for which one round is to do, where `WEIGHTS_BYTES` allow it."""
_ALIGNMENT = 256


@dataclass(frozen=True)
class AttentionShape:
    """Heads of a layer on one rank, and what they may see."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    table_keys: int
    """Keys that a row of the block table has room for."""


@dataclass(frozen=True)
class Split:
    """How the keys of sequences of few rows are cut in one call."""

    most_chunks: int
    """Chunks that a sequence's keys are cut into, at most."""
    grid_chunks: int
    """C: as many as may occur."""
    by_row: bool
    """Whether every row has a slot of its own; else every sequence has `FEW_ROWS`."""
    slots: int
    """R."""

    @classmethod
    def of(cls, shape: AttentionShape, num_rows: int, num_seqs: int) -> Split:
        """The cut of a call of so many rows and sequences, the null slot among them."""
        most_chunks = max(2, min(MAX_CHUNKS, PROGRAMS_PER_ROW_BLOCK // shape.num_kv_heads))
        keys = shape.table_keys if shape.window is None else min(shape.table_keys, shape.window + FEW_ROWS)
        by_row = num_rows <= num_seqs * FEW_ROWS
        return cls(
            most_chunks=most_chunks,
            grid_chunks=min(most_chunks, keys // MIN_CHUNK + 2),
            by_row=by_row,
            slots=num_rows if by_row else num_seqs * FEW_ROWS,
        )


@dataclass(frozen=True)
class FewSplit:
    """How keys are cut where programs are few (`gemray_kernels.triton.few_attention`); every row has a slot."""

    min_chunk: int
    """Keys of a chunk, at least."""
    chunks: int
    """C: as many as may occur."""

    @classmethod
    def of(cls, table_keys: int, window: int, min_chunk: int = MIN_CHUNK) -> FewSplit:
        """The cut of keys that a window bounds."""
        return cls(min_chunk, min(table_keys, window + FEW_ROWS) // min_chunk + 2)


def scratch_bytes(shape: AttentionShape, num_rows: int, num_seqs: int, itemsize: int) -> int:
    """Bytes with which no call of up to so many rows and sequences needs memory of its own, in fast numerics.

    Args:
        shape: of the layer.
        num_rows: of a step.
        num_seqs: of a step, the null slot among them.
        itemsize: of a query's number.
    """
    split = Split.of(shape, num_rows, num_seqs)
    partial = split.slots * shape.num_heads * split.grid_chunks * (shape.head_dim + 2) * 4
    if shape.window is not None:
        few = min(num_rows * shape.num_heads, FEW_CALL_PAIRS) * FewSplit.of(shape.table_keys, shape.window).chunks
        partial = max(partial, few * (shape.head_dim + 2) * 4)
    prompts = 0
    if shape.window is None and num_rows > FEW_ROWS:
        # A round's weights, their scales and totals, and sums that are carried to the next round.
        group = shape.num_heads // shape.num_kv_heads
        pairs = max(PROMPT_PAIRS, 1 << (group - 1).bit_length())
        pairs *= (num_rows // (pairs // group) + num_seqs) * shape.num_kv_heads
        rounds = max(1, WEIGHTS_BYTES // (pairs * itemsize * ROUND_KEYS))
        keys = min(rounds * ROUND_KEYS, USUAL_PROMPT, -(-shape.table_keys // KEYS) * KEYS)
        prompts = pairs * (keys * itemsize + (2 * keys // KEYS + 3) * 4)
        prompts += num_rows * shape.num_heads * shape.head_dim * 4
    return max(partial, prompts) + 4 * _ALIGNMENT


def carved(
    scratch: Tensor | None, device: torch.device, *wanted: tuple[Sequence[int], torch.dtype]
) -> tuple[Tensor, ...]:
    """Tensors of these shapes and dtypes that lie in the scratch side by side, or in memory of their own.

    Args:
        scratch: uint8, on the device; None where there is none. It is not used where it is too small.
        device: of the tensors.
        wanted: shape and dtype of each. What they hold is undefined.
    """
    sizes = [-(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in wanted]
    if scratch is None or sum(sizes) > scratch.numel():
        return tuple(torch.empty(*shape, dtype=dtype, device=device) for shape, dtype in wanted)
    found, first = [], 0
    for (shape, dtype), size in zip(wanted, sizes, strict=True):
        found.append(scratch[first : first + prod(shape) * dtype.itemsize].view(dtype).view(*shape))
        first += size
    return tuple(found)
