"""Sums of leaves of packed weights in exact numerics: in registers, unit by unit, added by the tree.

A unit's planes are neighbouring inputs, one plane after the other, and each leaf begins with a unit of its own. So a
leaf's sum is the chain of tile products that `gemray_kernels.triton.exact_linear` computes of the same numbers, and has
its bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.triton.exact_packed_unit import add_exact_unit, made_larger, repeated
from gemray_kernels.triton.packed_linear import load_planes, load_tile


@triton.jit  # type: ignore[untyped-decorator]
def _unit(  # type: ignore[no-untyped-def]
    acc,
    x0,
    x1,
    x2,
    x3,
    words_at,
    unit_scale_at,
    scale_at,
    factor,
    high,
    low,
    in_out,
    place,
    groups,
    scale_stride,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Loads one unit's words and scales, and adds its product."""
    words = load_tile(words_at, in_out, not EVEN_O)
    scales = words  # a name, where there are none
    if SCALING % 3 > 0:  # of planes or units
        scales = load_tile(unit_scale_at, in_out, not EVEN_O)
    return add_exact_unit(
        acc, x0, x1, x2, x3, words, scales, factor, high, low, scale_at, in_out, place, groups, scale_stride, GROUP,
        CODE, SCALING, PARTS, WORDS, WEIGHT_FIRST,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _leaf(  # type: ignore[no-untyped-def]
    x_at,
    words_at,
    scale_at,
    parts_at,
    factor,
    up_factor,
    is_row,
    in_out,
    c_x,
    leaf,
    units,
    place,
    groups,
    words_stride,
    scale_stride,
    parts_stride,
    outputs,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    IN_ONE_STEP: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    RUNS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """One leaf's sum in a single accumulator, over its units in order; zeros behind its end change nothing.

    With GATED also that of the same rows with the outputs that are `outputs` further, else the same sum twice.
    """
    acc = tl.zeros((in_out & is_row).shape, tl.float32)
    up = acc
    for step in range(0, STEP if IN_ONE_STEP else units, STEP):
        high, low = _load_parts(parts_at + step * parts_stride, factor, in_out, SCALING, PARTS, EVEN_O)
        up_high, up_low = high, low
        if GATED:
            up_high, up_low = _load_parts(
                parts_at + step * parts_stride + outputs, factor, in_out, SCALING, PARTS, EVEN_O
            )
        for ahead in tl.static_range(STEP):
            unit = step + ahead
            first = unit * (PLANES * WORDS)
            words_of_unit = words_at + unit * words_stride
            scale_of_unit = scale_at + unit * scale_stride
            x0, x1, x2, x3 = load_planes(x_at + first, leaf - first, c_x, is_row, PLANES, WORDS, EVEN_I)
            acc = _unit(
                acc, x0, x1, x2, x3, words_of_unit, scale_of_unit, scale_at, factor, high, low, in_out, place + first,
                groups, scale_stride, GROUP, CODE, SCALING, PARTS, WORDS, EVEN_O, WEIGHT_FIRST,
            )  # fmt: skip
            if GATED:
                up = _unit(
                    up, x0, x1, x2, x3, words_of_unit + outputs * WORDS, scale_of_unit + outputs * RUNS,
                    scale_at + outputs, up_factor, up_high, up_low, in_out, place + first, groups, scale_stride, GROUP,
                    CODE, SCALING, PARTS, WORDS, EVEN_O, WEIGHT_FIRST,
                )  # fmt: skip
    return made_larger(acc, CODE, SCALING, PARTS), made_larger(up, CODE, SCALING, PARTS)


@triton.jit  # type: ignore[untyped-decorator]
def _load_parts(parts_at, none, in_out, SCALING: tl.constexpr, PARTS: tl.constexpr, EVEN_O: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both parts of factors in int32, a part in either half; names where there are none or a unit's scale is one."""
    high = none
    low = none
    if PARTS > 0 and SCALING != 2:
        parts = load_tile(parts_at, in_out, not EVEN_O)
        high = repeated(parts)
        low = repeated(parts >> 16)
    return high, low


@triton.jit  # type: ignore[untyped-decorator]
def packed_subtree(  # type: ignore[no-untyped-def]
    x_at,
    words_at,
    scale_at,
    factor_at,
    parts_at,
    is_row,
    in_out,
    c_x,
    leaf,
    units,
    place,
    groups,
    words_stride,
    scale_stride,
    parts_stride,
    num_twins,
    outputs,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    IN_ONE_STEP: tl.constexpr,
    LEAVES: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    RUNS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_I: tl.constexpr,
    EVEN_O: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Sums of LEAVES leaves, added by the tree: [O, T] where the weight is first, else [T, O].

    Args:
        x_at: the rows' first words' inputs, as tiles of one plane; of the first of these leaves.
        words_at: the outputs' words of that leaf's first unit.
        scale_at: its scales.
        factor_at: each output's factor, float32.
        parts_at: its parts, int32, where PARTS says that there are some.
        is_row, in_out: which rows and outputs there are.
        c_x: places of the words along the tile of rows.
        leaf: inputs of a leaf, which has so many units, STEP of them a step, which IN_ONE_STEP says to be all.
        units: of a leaf.
        place: as of `scaled_by_place`, of the words along the tile of the weight.
        groups: as there, with scale_stride and GROUP.
        parts_stride: 0. Parts are loaded beside the words of each step: if they lay in registers, Triton would pass
            numbers through shared memory.
        num_twins: half of LEAVES, as an argument of the launch.
        outputs: how much further the outputs lie whose sums are the second result, with GATED, of one leaf.
    """
    factor = load_tile(factor_at, in_out, not EVEN_O)
    up_factor = factor
    if GATED:
        up_factor = load_tile(factor_at + outputs, in_out, not EVEN_O)
    result, up = tl.zeros((in_out & is_row).shape, tl.float32), tl.zeros((in_out & is_row).shape, tl.float32)
    if LEAVES == 1:
        result, up = _leaf(
            x_at, words_at, scale_at, parts_at, factor, up_factor, is_row, in_out, c_x, leaf, units, place, groups,
            words_stride, scale_stride, parts_stride, outputs, GROUP, STEP, IN_ONE_STEP, CODE, SCALING, PARTS, WORDS,
            PLANES, RUNS, GATED, EVEN_I, EVEN_O, WEIGHT_FIRST,
        )  # fmt: skip
    else:
        # Sums of two leaves and of four that wait for their neighbours to the right.
        two = tl.zeros((in_out & is_row).shape, tl.float32)
        four = tl.zeros((in_out & is_row).shape, tl.float32)
        # Not LEAVES // 2, which ptxas would know: see `dot`.
        for twins in range(num_twins):
            result, up = _leaf(
                x_at, words_at, scale_at, parts_at, factor, up_factor, is_row, in_out, c_x, leaf, units, place, groups,
                words_stride, scale_stride, parts_stride, outputs, GROUP, STEP, IN_ONE_STEP, CODE, SCALING, PARTS,
                WORDS, PLANES, RUNS, False, EVEN_I, EVEN_O, WEIGHT_FIRST,
            )  # fmt: skip
            x_at += leaf
            words_at += units * words_stride
            place += leaf
            if SCALING < 3:
                scale_at += units * scale_stride
            parts_at += parts_stride
            right, up = _leaf(
                x_at, words_at, scale_at, parts_at, factor, up_factor, is_row, in_out, c_x, leaf, units, place, groups,
                words_stride, scale_stride, parts_stride, outputs, GROUP, STEP, IN_ONE_STEP, CODE, SCALING, PARTS,
                WORDS, PLANES, RUNS, False, EVEN_I, EVEN_O, WEIGHT_FIRST,
            )  # fmt: skip
            result += right
            x_at += leaf
            words_at += units * words_stride
            place += leaf
            if SCALING < 3:
                scale_at += units * scale_stride
            parts_at += parts_stride
            if twins % 2 == 0:
                two = result
            else:
                result += two
                if twins % 4 == 1:
                    four = result
                else:
                    result += four
    return result, up
