"""A unit of packed weights in an exact product: its numbers, rounded once each, and their tile products in order."""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.triton.packed_dequantize import ones_of_e2m1, scaled_by_place
from gemray_kernels.triton.packed_linear import finished, tile_product
from gemray_kernels.triton.packed_planes import e4m3, int8, plain_int4, scaled_e2m1, scaled_int4


@triton.jit  # type: ignore[untyped-decorator]
def rounded(  # type: ignore[no-untyped-def]
    plane, factor, scale_at, in_out, place, groups, scale_stride, GROUP: tl.constexpr, SCALING: tl.constexpr
):
    """A plane's numbers with their scales, rounded once."""
    plane = scaled_by_place(plane, scale_at, in_out, place, groups, scale_stride, GROUP, SCALING)
    return (plane * factor).to(tl.bfloat16)


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
    scale_at,
    in_out,
    place,
    groups,
    scale_stride,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    WORDS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Adds the product with a unit's numbers to `acc`; those of int4 with a plane's scales are 2^-21 of themselves.

    `x2` and `x3` are of codes with four planes; `scales` is of the kind that CODE and SCALING say. From `scale_at` on
    are as `scaled_by_place` takes them.
    """
    if SCALING == 2:
        factor = factor * scales
    if CODE < 2:
        if CODE == 1:
            if SCALING == 3:
                scales = ones_of_e2m1(words)
            w0, w1, w2, w3 = scaled_e2m1(words, scales)
        elif SCALING == 1:
            w0, w1, w2, w3 = scaled_int4(words, scales)
        else:
            w0, w1, w2, w3 = plain_int4(words)
        if CODE == 1 or SCALING != 1:
            w0 = rounded(w0, factor, scale_at, in_out, place, groups, scale_stride, GROUP, SCALING)
            w1 = rounded(w1, factor, scale_at, in_out, place + WORDS, groups, scale_stride, GROUP, SCALING)
            w2 = rounded(w2, factor, scale_at, in_out, place + 2 * WORDS, groups, scale_stride, GROUP, SCALING)
            w3 = rounded(w3, factor, scale_at, in_out, place + 3 * WORDS, groups, scale_stride, GROUP, SCALING)
        acc = tile_product(x0, w0, acc, WEIGHT_FIRST)
        acc = tile_product(x1, w1, acc, WEIGHT_FIRST)
        acc = tile_product(x2, w2, acc, WEIGHT_FIRST)
        acc = tile_product(x3, w3, acc, WEIGHT_FIRST)
    else:
        if CODE == 2:
            w0, w1 = int8(words)
        else:
            w0, w1 = e4m3(words)
        w0 = rounded(w0, factor, scale_at, in_out, place, groups, scale_stride, GROUP, SCALING)
        w1 = rounded(w1, factor, scale_at, in_out, place + WORDS, groups, scale_stride, GROUP, SCALING)
        acc = tile_product(x0, w0, acc, WEIGHT_FIRST)
        acc = tile_product(x1, w1, acc, WEIGHT_FIRST)
    return finished(acc)
