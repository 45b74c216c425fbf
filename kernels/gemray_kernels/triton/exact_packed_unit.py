"""A unit of packed weights in an exact product: its numbers, rounded once each, and their tile products in order."""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.triton.exact_packed_numbers import e2m1_in_parts, e4m3_in_parts, int4_in_parts, int8_in_parts
from gemray_kernels.triton.packed_dequantize import ones_of_e2m1, scaled_by_place
from gemray_kernels.triton.packed_linear import finished, tile_product
from gemray_kernels.triton.packed_planes import e4m3, int8, plain_int4, scaled_e2m1, scaled_int4


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(  # type: ignore[no-untyped-def]
    plane, factor, scale_at, in_out, place, groups, scale_stride, GROUP: tl.constexpr, SCALING: tl.constexpr
):
    """A plane's numbers with their scales, rounded once."""
    plane = scaled_by_place(plane, scale_at, in_out, place, groups, scale_stride, GROUP, SCALING)
    return (plane * factor).to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def _four_planes(  # type: ignore[no-untyped-def]
    words,
    scales,
    factor,
    high,
    low,
    scale_at,
    in_out,
    place,
    groups,
    scale_stride,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    AXIS: tl.constexpr,
):
    if CODE == 0 and SCALING == 1:
        w0, w1, w2, w3 = scaled_int4(words, scales)
    elif CODE == 0 and PARTS > 0:
        w0, w1, w2, w3 = int4_in_parts(words, high, low, PARTS)
    elif PARTS > 0:
        w0, w1, w2, w3 = e2m1_in_parts(words, scales, high, low, PARTS, AXIS)
    else:
        if CODE == 0:
            w0, w1, w2, w3 = plain_int4(words)
        else:
            if SCALING == 3:
                scales = ones_of_e2m1(words)
            w0, w1, w2, w3 = scaled_e2m1(words, scales, AXIS)
        w0 = _rounded(w0, factor, scale_at, in_out, place, groups, scale_stride, GROUP, SCALING)
        w1 = _rounded(w1, factor, scale_at, in_out, place + WORDS, groups, scale_stride, GROUP, SCALING)
        w2 = _rounded(w2, factor, scale_at, in_out, place + 2 * WORDS, groups, scale_stride, GROUP, SCALING)
        w3 = _rounded(w3, factor, scale_at, in_out, place + 3 * WORDS, groups, scale_stride, GROUP, SCALING)
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def _two_planes(  # type: ignore[no-untyped-def]
    words,
    factor,
    high,
    low,
    scale_at,
    in_out,
    place,
    groups,
    scale_stride,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    AXIS: tl.constexpr,
):
    if PARTS > 0 and CODE == 2:
        w0, w1 = int8_in_parts(words, high, low, PARTS)
    elif PARTS > 0:
        w0, w1 = e4m3_in_parts(words, high, low, PARTS, AXIS)
    else:
        if CODE == 2:
            w0, w1 = int8(words)
        else:
            w0, w1 = e4m3(words, AXIS)
        w0 = _rounded(w0, factor, scale_at, in_out, place, groups, scale_stride, GROUP, SCALING)
        w1 = _rounded(w1, factor, scale_at, in_out, place + WORDS, groups, scale_stride, GROUP, SCALING)
    return w0, w1


@triton.jit  # type: ignore[untyped-decorator]
def add_exact_unit(  # type: ignore[no-untyped-def]
    acc,
    x0,
    x1,
    x2,
    x3,
    words,
    scales,
    factor,
    high,
    low,
    scale_at,
    in_out,
    place,
    groups,
    scale_stride,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Adds the product with a unit's numbers to `acc`; some are made smaller than they are, as `made_larger` knows.

    `x2` and `x3` are of codes with four planes; `scales` is of the kind that CODE and SCALING say; `high` and `low` are
    the parts of factors where PARTS says that there are some. From `scale_at` on are as `scaled_by_place` takes them.
    """
    if SCALING == 2:
        if PARTS > 0:  # of e4m3, 2^120 as large
            high = repeated((scales * (2.0**120)).to(tl.int32, bitcast=True) >> 16)
            low = high
        else:
            factor = factor * scales
    if CODE < 2:
        w0, w1, w2, w3 = _four_planes(
            words, scales, factor, high, low, scale_at, in_out, place, groups, scale_stride, GROUP, CODE, SCALING,
            PARTS, WORDS, WEIGHT_FIRST,
        )  # fmt: skip
        acc = tile_product(x0, w0, acc, WEIGHT_FIRST)
        acc = tile_product(x1, w1, acc, WEIGHT_FIRST)
        acc = tile_product(x2, w2, acc, WEIGHT_FIRST)
        acc = tile_product(x3, w3, acc, WEIGHT_FIRST)
    else:
        w0, w1 = _two_planes(
            words, factor, high, low, scale_at, in_out, place, groups, scale_stride, GROUP, CODE, SCALING, PARTS, WORDS,
            WEIGHT_FIRST,
        )  # fmt: skip
        acc = tile_product(x0, w0, acc, WEIGHT_FIRST)
        acc = tile_product(x1, w1, acc, WEIGHT_FIRST)
    return finished(acc)


@triton.jit  # type: ignore[untyped-decorator]
def made_larger(acc, CODE: tl.constexpr, SCALING: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of numbers that `add_exact_unit` made smaller, as large as they are, which rounds nothing."""
    if (CODE == 0 and SCALING == 1) or (CODE == 2 and PARTS == 1):
        acc *= 2.0**21
    return acc


@triton.jit
def repeated(half):  # type: ignore[no-untyped-def]
    """The lower half of each int32 in both halves, for products of two numbers at a time."""
    return (half & 0xFFFF) * 0x10001
