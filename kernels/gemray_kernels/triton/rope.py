"""Cosines and sines of a pass's positions, of two layer types in one Triton kernel.

Angles, cosines and sines are float32 and rounded once, with the device library's exact range reduction: what PyTorch
computes on the same device, bit for bit.

Shape legend: T rows, D head dim, H = D / 2 rotating pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_contiguous
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs


def rope_tables(
    positions_T: Tensor, frequencies: Sequence[Tensor], dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], ...]:
    """As `gemray_kernels.reference.rope.rope_tables`."""
    tables: list[tuple[Tensor, Tensor]] = []
    for i in range(0, len(frequencies), 2):
        tables += _of_two(positions_T, frequencies[i], frequencies[min(i + 1, len(frequencies) - 1)], dtype)
    return tuple(tables[: len(frequencies)])


def _of_two(positions_T: Tensor, first_H: Tensor, second_H: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    require_contiguous(positions=positions_T, first=first_H, second=second_H)
    num_rows = len(positions_T)
    tables = [
        torch.empty(2, num_rows, 1, 2 * len(frequencies_H), dtype=dtype, device=positions_T.device)
        for frequencies_H in (first_H, second_H)
    ]
    early = starts_early(positions_T)
    if num_rows:
        _rope_kernel[(num_rows, 1 if second_H is first_H else 2)](
            positions_T,
            first_H,
            second_H,
            *tables,
            num_rows,
            len(first_H),
            len(second_H),
            BLOCK_H=triton.next_power_of_2(max(len(first_H), len(second_H))),
            EARLY=early,
            num_warps=2,
            enable_fp_fusion=False,
            launch_pdl=early,
        )
    return [(cos_sin[0], cos_sin[1]) for cos_sin in tables]


@triton.jit  # type: ignore[untyped-decorator]
def _write_angles(position, row, frequencies_H, out_2TD, num_rows, num_pairs, BLOCK_H: tl.constexpr):  # type: ignore[no-untyped-def]
    pair_H = tl.arange(0, BLOCK_H)
    inside_H = pair_H < num_pairs
    angle_H = position.to(tl.float32) * tl.load(frequencies_H + pair_H, mask=inside_H, other=0.0)
    dtype = out_2TD.dtype.element_ty
    cos_H = tl.cos(angle_H).to(dtype)
    sin_H = tl.sin(angle_H).to(dtype)
    cos_D = out_2TD + row * 2 * num_pairs
    sin_D = cos_D + num_rows * 2 * num_pairs
    tl.store(cos_D + pair_H, cos_H, mask=inside_H)
    tl.store(cos_D + num_pairs + pair_H, cos_H, mask=inside_H)
    tl.store(sin_D + pair_H, sin_H, mask=inside_H)
    tl.store(sin_D + num_pairs + pair_H, sin_H, mask=inside_H)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rope_kernel(  # type: ignore[no-untyped-def]
    positions_T,
    first_H,
    second_H,
    first_2TD,
    second_2TD,
    num_rows,
    num_first,
    num_second,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_T + row)
    if tl.program_id(1) == 0:
        _write_angles(position, row, first_H, first_2TD, num_rows, num_first, BLOCK_H)
    else:
        _write_angles(position, row, second_H, second_2TD, num_rows, num_second, BLOCK_H)
