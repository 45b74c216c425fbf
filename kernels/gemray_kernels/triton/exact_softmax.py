"""Arithmetic of exact attention: a row's bits do not follow from which program computes it.

A row's keys are cut into **chunks** at fixed places (`chunk_of`, `chunk_start`). Within a chunk the products with
values are one chain of the matrix units over the keys in order; chunks are added in order. What is left to choose, and
follows rows and lengths, is which program takes which chunks and how many keys it takes at a time. This changes no bit:

- Shifts of exponents are whole numbers (`shift_of`), so that every rescaling is by a power of two and exact.
- With 16-bit weights, scores are rounded to multiples of 2^-10 (`rounded_score`); then score - shift is exact, and the
  weight behind another shift is the same number times a power of two. This rounding is a fifth of the weights' own.
- Hidden keys have the weight 0, which adds nothing; a chunk of which a row sees no key is added as 0.
- Sums of weights are made by the matrix units, too, in the same order.

A weight 2^126 times smaller than the largest becomes 0, which depends on the shift. It is beyond what sums hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALL_CHUNK = tl.constexpr(64)
"""Keys of the smallest chunk."""
SMALL_CHUNKS_END = tl.constexpr(32 * 64)
"""Without a window, chunks behind this position are larger: 16 of one size, then of twice as many keys, and so on."""
LARGE_CHUNK = tl.constexpr(4096)
LARGE_CHUNKS_BEGIN = tl.constexpr(65536)
SMALL_CHUNK_WINDOW = 512
"""Chunks have twice as many keys behind larger windows than this."""
ONES = tl.constexpr(16)
"""Columns of ones that sum weights: the fewest that the matrix units take."""


def smallest_chunk(window: int | None) -> int:
    """Keys of the smallest chunk; with a window, of all."""
    small: int = SMALL_CHUNK.value
    return small if window is None or window <= SMALL_CHUNK_WINDOW else 2 * small


def num_chunks(num_keys: int) -> int:
    """Chunks of the first `num_keys` keys without a window; at least one."""
    last = max(0, num_keys - 1)
    smallest: int = SMALL_CHUNK.value
    small_end: int = SMALL_CHUNKS_END.value
    large_begin: int = LARGE_CHUNKS_BEGIN.value
    large: int = LARGE_CHUNK.value
    if last < small_end:
        return last // smallest + 1
    if last >= large_begin:
        return 112 + (last - large_begin) // large + 1
    octave = last.bit_length() - small_end.bit_length()
    return 32 + 16 * octave + (last - (small_end << octave)) // (2 * smallest << octave) + 1


@triton.jit  # type: ignore[untyped-decorator]
def chunk_of(key, CHUNK: tl.constexpr, GROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of a key's chunk; CHUNK is the smallest chunk's keys, GROWS holds without a window."""
    chunk = key // CHUNK
    if GROWS:
        octave = tl.where(key >= 4096, 1, 0) + tl.where(key >= 8192, 1, 0)
        octave += tl.where(key >= 16384, 1, 0) + tl.where(key >= 32768, 1, 0)
        middle = 32 + 16 * octave + (key - (SMALL_CHUNKS_END << octave)) // ((2 * CHUNK) << octave)
        chunk = tl.where(key < SMALL_CHUNKS_END, chunk, middle)
        chunk = tl.where(key < LARGE_CHUNKS_BEGIN, chunk, 112 + (key - LARGE_CHUNKS_BEGIN) // LARGE_CHUNK)
    return chunk


@triton.jit  # type: ignore[untyped-decorator]
def chunk_start(chunk, CHUNK: tl.constexpr, GROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key of a chunk; constants as of `chunk_of`."""
    start = chunk * CHUNK
    if GROWS:
        octave = tl.minimum(tl.maximum(chunk - 32, 0) // 16, 4)
        middle = (SMALL_CHUNKS_END << octave) + (chunk - 32 - 16 * octave) * ((2 * CHUNK) << octave)
        start = tl.where(chunk < 32, start, middle)
        start = tl.where(chunk < 112, start, LARGE_CHUNKS_BEGIN + (chunk - 112) * LARGE_CHUNK)
    return start


@triton.jit  # type: ignore[untyped-decorator]
def rounded_score(score, scale_log2, GRID: tl.constexpr):  # type: ignore[no-untyped-def]
    """``GRID + score · scale``, whose last place is 2^-10 where GRID is 1.5 · 2^13; GRID 0 rounds nothing."""
    return tl.math.fma(score, scale_log2, GRID)


@triton.jit  # type: ignore[untyped-decorator]
def shift_of(largest_M, scale_log2, GRID: tl.constexpr):  # type: ignore[no-untyped-def]
    """The whole number at or above the largest scaled score; -inf of none."""
    return tl.ceil(rounded_score(largest_M, scale_log2, GRID) - GRID)


@triton.jit
def finite(shift):  # type: ignore[no-untyped-def]
    """The shift, 0 where nothing was seen."""
    return tl.where(shift == float("-inf"), 0.0, shift)


@triton.jit  # type: ignore[untyped-decorator]
def weights_of(score_ML, shift_M, scale_log2, GRID: tl.constexpr):  # type: ignore[no-untyped-def]
    """2^(score · scale - shift), 0 of hidden keys, whose score is -inf."""
    return tl.exp2(rounded_score(score_ML, scale_log2, GRID) - (GRID + finite(shift_M))[:, None])


@triton.jit
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """2^exponent of a whole number up to 127, without rounding; 0 below 2^-126."""
    return ((tl.maximum(exponent, -127.0) + 127.0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
