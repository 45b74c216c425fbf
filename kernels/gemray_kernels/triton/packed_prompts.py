"""Products of many rows with packed weights, whose numbers are made in registers while the tensor cores multiply.

All planes of a unit are one operand, so that its tile products follow each other without a wait between them.

Shape legend: T rows, I inputs, O outputs, S splits of the inputs, B units, C words of a unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.packed_tiles import UNITS, TiledWeight
from gemray_kernels.triton.dot import dot
from gemray_kernels.triton.packed_linear import CODES, finished, load_tile
from gemray_kernels.triton.packed_planes import e4m3, int8, plain_int4, scaled_e2m1, scaled_int4


@dataclass(frozen=True)
class PromptTile:
    """What one program of a product of many rows holds, and into how many parts the inputs are cut."""

    outputs: int
    """A multiple of 16 for each warp."""
    rows: int
    num_warps: int
    num_stages: int
    splits: int = 1
    most_registers: int | None = None
    """Registers that a thread may have; None leaves it to the compiler."""


def packed_prompt_linear(
    x_TI: Tensor, weight: TiledWeight, tile: PromptTile, *, out_dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Summands [S, T, O - first] of ``x · weightᵀ``: the product is their `total`.

    Args:
        x_TI: bfloat16 rows, at least one, inputs contiguous.
        weight: without a leading dimension.
        tile: of this product.
        out_dtype: of the summands; float32 unless there is only one.
        first: outputs that are left out.
    """
    num_rows, num_in = x_TI.shape
    if num_rows == 0 or x_TI.stride(1) != 1 or num_in != weight.num_in:
        raise ValueError(
            f"x {list(x_TI.shape)} with strides {x_TI.stride()} and a weight of {weight.num_in} inputs: rows of "
            f"as many, one beside the other, and at least one are allowed"
        )
    num_out = weight.num_out - first
    out_STO = torch.empty(tile.splits, num_rows, num_out, dtype=out_dtype, device=x_TI.device)
    unit = UNITS[weight.code]
    # Programs that share a part of the weight are neighbours.
    _packed_prompt_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_out, tile.outputs), tile.splits)](
        x_TI,
        weight.words_BOC[:, first:],
        weight.scale_BO[..., first:],
        weight.factor_O[first:],
        out_STO,
        num_rows,
        num_in,
        num_out,
        weight.words_BOC.shape[0],
        x_TI.stride(0),
        weight.words_BOC.stride(0),
        weight.scale_BO.stride(0),
        CODE=CODES[weight.code],
        SCALING=weight.scaling.value,
        WORDS=unit.words,
        PLANES=unit.planes,
        BLOCK_T=tile.rows,
        BLOCK_O=tile.outputs,
        EVEN_I=num_in % unit.inputs == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.most_registers,
    )
    return out_STO


@triton.jit  # type: ignore[untyped-decorator]
def numbers_of(words, scales, CODE: tl.constexpr, SCALING: tl.constexpr):  # type: ignore[no-untyped-def]
    """A unit's numbers [O, I] in the order of its inputs, plane after plane, of its words [O, C].

    Planes are put side by side in each thread's registers; no number moves between threads.
    """
    if CODE < 2:
        if CODE == 1:
            w0, w1, w2, w3 = scaled_e2m1(words, scales)
        elif SCALING == 1:
            w0, w1, w2, w3 = scaled_int4(words, scales)
        else:
            w0, w1, w2, w3 = plain_int4(words)
        planes = tl.permute(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [0, 2, 3, 1])
        numbers = tl.reshape(planes, [words.shape[0], 4 * words.shape[1]])
    else:
        if CODE == 2:
            w0, w1 = int8(words)
        else:
            w0, w1 = e4m3(words)
        planes = tl.permute(tl.join(w0, w1), [0, 2, 1])
        numbers = tl.reshape(planes, [words.shape[0], 2 * words.shape[1]])
    return numbers


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _packed_prompt_kernel(  # type: ignore[no-untyped-def]
    x_TI,
    words_BOC,
    scale_BO,
    factor_O,
    out_STO,
    num_rows,
    num_in,
    num_out,
    units,
    x_stride,
    words_stride,
    scale_stride,
    CODE: tl.constexpr,
    SCALING: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EVEN_I: tl.constexpr,
):
    split = tl.program_id(2)
    first_unit = split * units // tl.num_programs(2)
    end_unit = (split + 1) * units // tl.num_programs(2)
    t_1T = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[None, :]
    o_O1 = (tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O))[:, None]
    i_I1 = tl.arange(0, PLANES * WORDS)[:, None]
    # Past the end the last row and the last output are computed again, and not stored: loads need no mask.
    row_1T = tl.minimum(t_1T, num_rows - 1).to(tl.int64)
    output_O1 = tl.minimum(o_O1, num_out - 1)
    words_at = words_BOC + output_O1 * WORDS + tl.arange(0, WORDS)[None, :]
    scale_at = scale_BO + output_O1
    x_at = x_TI + row_1T * x_stride + i_I1
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for unit in range(first_unit, end_unit):
        first = unit * (PLANES * WORDS)
        words = tl.load(words_at + unit * words_stride)
        scales = words  # a name, where there are none
        if SCALING > 0:
            scales = tl.load(scale_at + unit * scale_stride)
        x = load_tile(x_at + first, i_I1 < num_in - first, not EVEN_I)
        numbers = numbers_of(words, scales, CODE, SCALING)
        if SCALING == 2:
            acc += dot(numbers, x, tl.zeros([BLOCK_O, BLOCK_T], tl.float32)) * scales
        else:
            acc = finished(dot(numbers, x, acc))
    acc *= tl.load(factor_O + output_O1)
    to = (split.to(tl.int64) * num_rows + t_1T) * num_out + o_O1
    tl.store(out_STO + to, acc.to(out_STO.dtype.element_ty), mask=(o_O1 < num_out) & (t_1T < num_rows))
