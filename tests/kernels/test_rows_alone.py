"""What lies between a model's products gives a row the same bits beside any others, in the references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference.layer_norms import total
from gemray_kernels.table import REFERENCE
from support.kernels.rows_alone import RowsAlone, Widths, dependent

GROUPS = (slice(0, 1), slice(7, 8), slice(3, 6), slice(0, 17))
WIDTHS = (Widths(64, 4, 2, 16, 8, 2, 8), Widths(176, 4, 1, 32, 24, 8, 24))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda widths: str(widths.hidden))
def test_a_row_has_the_bits_that_it_has_alone(widths: Widths, dtype: torch.dtype) -> None:
    assert dependent(REFERENCE, RowsAlone(widths, 40, "cpu", dtype), GROUPS) == []


def test_sums_that_follow_the_rows_are_seen() -> None:
    """A norm over the whole step's mean is the crudest of them, a total in another order the finest."""

    def by_halves(x_TD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
        halves = x_TD.pow(2).unflatten(-1, (2, -1)).sum(-1)
        mean_T1 = (total(halves.t(), x_TD.dtype) if len(x_TD) > 4 else x_TD.pow(2).sum(-1)).unsqueeze(-1)
        return x_TD * (mean_T1 / x_TD.shape[-1] + eps).pow(-0.5) * (1.0 if weight_D is None else weight_D)

    inputs = RowsAlone(WIDTHS[1], 40, "cpu", torch.float32)
    found = dependent(replace(REFERENCE, rms_norm=by_halves), inputs, GROUPS)
    assert found
    assert all(line.startswith("rms_norm") for line in found)
