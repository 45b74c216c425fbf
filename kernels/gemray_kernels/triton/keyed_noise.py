"""`keyed_gumbel` in one Triton kernel: the same words, and the same noise up to the last digits of the logarithms.

Philox itself is Triton's own (Philox4x32-10), so each of the two implementations checks the other.

Shape legend: R rows, V ids of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def keyed_gumbel(seed_R: Tensor, position_R: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise of each (row, id); arguments and result as in `gemray_kernels.reference.keyed_noise`."""
    num_rows, num_ids = len(seed_R), token_ids.shape[-1]
    ids_RV = token_ids.expand(num_rows, num_ids)
    noise_RV = torch.empty(num_rows, num_ids, dtype=dtype, device=token_ids.device)
    if noise_RV.numel():
        _keyed_gumbel_kernel[(num_rows, triton.cdiv(num_ids, BLOCK))](
            seed_R.contiguous(),
            position_R.contiguous(),
            ids_RV,
            noise_RV,
            num_ids,
            ids_RV.stride(0),
            ids_RV.stride(1),
            BELOW_ONE=1.0 - torch.finfo(dtype).eps / 2,
            BLOCK=BLOCK,
        )
    return noise_RV


@triton.jit  # type: ignore[untyped-decorator]
def _keyed_gumbel_kernel(  # type: ignore[no-untyped-def]
    seed_R,
    position_R,
    ids_RV,
    noise_RV,
    num_ids,
    ids_row_stride,
    ids_column_stride,
    BELOW_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_ids
    seed = tl.load(seed_R + row)
    position = tl.load(position_R + row)
    token = tl.load(ids_RV + row * ids_row_stride + column * ids_column_stride, mask=inside, other=0)

    noise = gumbel(seed, position, token, noise_RV.dtype.element_ty, BELOW_ONE)
    tl.store(noise_RV + row * num_ids + column, noise, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def gumbel(seed, position, token, dtype: tl.constexpr, BELOW_ONE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Noise of ids >= 0 under one seed at one position."""
    group = (token >> 2).to(tl.uint32)
    zero = group * 0
    position_low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    position_high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(seed, position_low, position_high, group, zero)
    lane = token & 3
    word = tl.where(lane == 0, word0, tl.where(lane == 1, word1, tl.where(lane == 2, word2, word3)))

    w = tl.minimum((word.to(dtype) + 0.5) * 2.3283064365386963e-10, BELOW_ONE)
    # -log1p(-w): log(1 - w) alone loses the digits of a small w, and (1 - w) - 1 is exactly what it lost.
    rest = 1.0 - w
    lost = 1.0 - rest
    exponential = tl.where(lost == 0.0, w, -tl.log(rest) * (w / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(exponential)
