"""What lies between a model's products gives a row the same bits beside any others, in the kernels of a card."""

from __future__ import annotations

import pytest
import torch

from gemray_kernels.table import kernels_for
from support.engine.gpu import needs_gpus
from support.kernels.rows_alone import RowsAlone, Widths, dependent

pytestmark = pytest.mark.gpu

WIDTHS = {
    "31B": Widths(5376, 32, 16, 256, 128, 8, 0),
    "26B-A4B": Widths(2816, 16, 8, 256, 128, 8, 0),
    "E4B": Widths(2560, 8, 2, 256, 128, 8, 256),
    "E2B": Widths(1536, 8, 1, 256, 128, 8, 256),
    "gemray-tiny": Widths(256, 8, 2, 32, 16, 4, 32),
}
GROUPS = (slice(0, 1), slice(77, 78), slice(3, 8), slice(100, 117), slice(16, 128), slice(0, 512))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", WIDTHS)
def test_a_row_has_the_bits_that_it_has_alone(shape: str, dtype: torch.dtype) -> None:
    needs_gpus(1)
    kernels = kernels_for(torch.device("cuda"), dtype)
    assert dependent(kernels, RowsAlone(WIDTHS[shape], 700, "cuda", dtype), GROUPS) == []
