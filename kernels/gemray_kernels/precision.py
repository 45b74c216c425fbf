"""How wide the sensitive parts of a forward pass are computed."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS_PER_BLOCK = 8192


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, softmax and logits for weights of `dtype`: the wider of float32 and `dtype`."""
    return torch.promote_types(torch.float32, dtype)


def wide_linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """``x · weightᵀ`` [T, O] in the compute dtype, never rounded to a narrower weight dtype on the way.

    Logits of 16-bit weights come out in float32: rounded to bfloat16 they would tie often (spec 6.3).
    """
    wide = compute_dtype(weight_OI.dtype)
    if weight_OI.dtype == wide:
        return torch.nn.functional.linear(x_TI, weight_OI)
    if weight_OI.is_cuda:
        return torch.mm(x_TI, weight_OI.t(), out_dtype=wide)
    x_TI = x_TI.to(wide)
    blocks = [torch.nn.functional.linear(x_TI, block.to(wide)) for block in torch.split(weight_OI, _ROWS_PER_BLOCK)]
    return torch.cat(blocks, dim=-1)
