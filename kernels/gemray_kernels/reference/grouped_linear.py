"""Linear layers of several experts over rows sorted by expert.

Shape legend: R rows sorted by expert, E experts, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, row_ends_E: Tensor) -> Tensor:
    """``x · weight[e]ᵀ`` [R, O], e the expert of each row: rows ``row_ends[e-1] .. row_ends[e]`` are expert e's.

    Args:
        x_RI: rows sorted by expert.
        weight_EOI: every expert's weight.
        row_ends_E: int32, cumulative rows; the last is R.
    """
    if x_RI.is_cuda and x_RI.dtype == torch.bfloat16:  # reads the counts on the device: no host sync
        return torch.nn.functional.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=row_ends_E)
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    start = 0
    for expert, end in enumerate(row_ends_E.tolist()):
        if end > start:
            torch.mm(x_RI[start:end], weight_EOI[expert].t(), out=out_RO[start:end])
        start = end
    return out_RO
