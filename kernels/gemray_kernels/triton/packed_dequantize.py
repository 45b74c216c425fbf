"""Packed weights as bfloat16 ones, for products of so many rows that the library's tiles pay for reading them twice.

Shape legend: O outputs, I inputs, B units, C words of a unit, R runs of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.triton.packed_linear import CODES
from gemray_kernels.triton.packed_planes import e4m3, int8, plain_int4, scaled_e2m1, scaled_int4

BLOCK = 64


def dequantized(weight: TiledWeight, first: int = 0) -> Tensor:
    """The numbers [O - first, I] of the outputs from `first` on, of a weight without a leading dimension."""
    unit, scale_BO = weight.unit, weight.scales_from(first)
    num_out = weight.num_out - first
    out_OI = torch.empty(num_out, weight.num_in, dtype=torch.bfloat16, device=weight.words_BOC.device)
    _dequantize_kernel[(weight.words_BOC.shape[0], triton.cdiv(num_out, BLOCK))](
        weight.words_BOC[:, first:],
        scale_BO,
        weight.factor_O[first:],
        out_OI,
        weight.num_in,
        num_out,
        weight.leaf,
        weight.units_of_leaf,
        weight.place,
        weight.scale_BO.shape[0],
        weight.words_BOC.stride(0),
        scale_BO.stride(0),
        GROUP=weight.group,
        CODE=CODES[weight.code],
        SCALING=weight.scaling.value,
        WORDS=unit.words,
        PLANES=unit.planes,
        RUNS=weight.runs,
        BLOCK_O=BLOCK,
        EVEN_I=weight.leaf % unit.inputs == 0,
        num_warps=4,
    )
    return out_OI


@triton.jit
def ones_of_e2m1(words):  # type: ignore[no-untyped-def]
    """Four scales of 1 for each of the words."""
    return (words * 0).to(tl.int32) - 0x75757576


@triton.jit  # type: ignore[untyped-decorator]
def scaled_by_place(  # type: ignore[no-untyped-def]
    plane, scale_at, in_out, place, groups, scale_stride, GROUP: tl.constexpr, SCALING: tl.constexpr
):
    """A plane's numbers in float32, times the scales of their groups where SCALING says that these follow the place.

    Args:
        plane: numbers of a few digits, whose product with a scale is exact.
        scale_at: each output's scale of the first group.
        in_out: which outputs there are.
        place: of the plane's numbers, from the first group's beginning on; those behind the end have any scale.
        groups: how many there are.
        scale_stride: between groups.
    """
    plane = plane.to(tl.float32)
    if SCALING == 3:
        plane *= tl.load(scale_at + tl.minimum(place // GROUP, groups - 1) * scale_stride, mask=in_out, other=0.0)
    return plane


@triton.jit  # type: ignore[untyped-decorator]
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    words_BOC,
    scale_BO,
    factor_O,
    out_OI,
    num_in,
    num_out,
    leaf,
    units_of_leaf,
    place,
    groups,
    words_stride,
    scale_stride,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EVEN_I: tl.constexpr,
):
    unit = tl.program_id(0)
    o_O1 = (tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O))[:, None]
    c_1C = tl.arange(0, WORDS)[None, :]
    r_1R = tl.arange(0, RUNS)[None, :]
    in_out = o_O1 < num_out
    words = tl.load(words_BOC + unit * words_stride + o_O1 * WORDS + c_1C, mask=in_out, other=0)
    factor = tl.load(factor_O + o_O1, mask=in_out, other=0.0)
    scales = words  # a name, where there are none
    if SCALING % 3 > 0:  # of planes or units
        scales = tl.load(scale_BO + unit * scale_stride + o_O1 * RUNS + r_1R, mask=in_out, other=0)
    if SCALING == 2:
        factor *= scales
    scale_at = scale_BO + o_O1
    i_1C = unit % units_of_leaf * (PLANES * WORDS) + c_1C
    at = out_OI + o_O1.to(tl.int64) * num_in + unit // units_of_leaf * leaf + i_1C
    # A mask that differs along a row would make stores of single numbers.
    left = leaf - i_1C
    place += unit // units_of_leaf * leaf + i_1C
    inside = in_out
    inside_1 = in_out
    inside_2 = in_out
    inside_3 = in_out
    if not EVEN_I:
        inside = in_out & (left > 0)
        inside_1 = in_out & (left > WORDS)
        inside_2 = in_out & (left > 2 * WORDS)
        inside_3 = in_out & (left > 3 * WORDS)
    if CODE < 2:
        if CODE == 1:
            if SCALING == 3:
                scales = ones_of_e2m1(words)
            w0, w1, w2, w3 = scaled_e2m1(words, scales, 1)
        elif SCALING == 1:
            w0, w1, w2, w3 = scaled_int4(words, scales)
        else:
            w0, w1, w2, w3 = plain_int4(words)
        w2 = scaled_by_place(w2, scale_at, in_out, place + 2 * WORDS, groups, scale_stride, GROUP, SCALING)
        w3 = scaled_by_place(w3, scale_at, in_out, place + 3 * WORDS, groups, scale_stride, GROUP, SCALING)
        tl.store(at + 2 * WORDS, (w2 * factor).to(tl.bfloat16), mask=inside_2)
        tl.store(at + 3 * WORDS, (w3 * factor).to(tl.bfloat16), mask=inside_3)
    elif CODE == 2:
        w0, w1 = int8(words)
    else:
        w0, w1 = e4m3(words, 1)
    w0 = scaled_by_place(w0, scale_at, in_out, place, groups, scale_stride, GROUP, SCALING)
    w1 = scaled_by_place(w1, scale_at, in_out, place + WORDS, groups, scale_stride, GROUP, SCALING)
    tl.store(at, (w0 * factor).to(tl.bfloat16), mask=inside)
    tl.store(at + WORDS, (w1 * factor).to(tl.bfloat16), mask=inside_1)
