"""Attention's inputs of many rows: the numbers that few rows at a time give, and programs without barriers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.triton.attention_inputs import attention_inputs
from support.kernels.attention_input_rows import SHAPES
from support.kernels.interpreted import interpreted
from support.kernels.triton_compile import compile_launches


def test_interpreted_rows_do_not_depend_on_their_number() -> None:
    lines = [line.split("\t") for line in interpreted("attention_inputs").splitlines()]
    assert len(lines) == 6
    for name, differing, wrong in lines:
        assert int(differing) == 0, name
        assert float(wrong) < 1e-6, name


@pytest.mark.parametrize("shape", SHAPES)
def test_a_head_is_a_warp_s_whatever_the_rows(shape: str) -> None:
    """Sums that ran over several warps would take another order."""
    heads, kv_heads, head_dim = SHAPES[shape]
    norm = Norm(torch.empty(head_dim, dtype=torch.bfloat16), 1e-6)
    found = []
    for rows in (1, 300):
        pages = torch.empty(2, 30, 16, kv_heads, head_dim, dtype=torch.bfloat16)
        write = KVWrite(norm, False, pages[0], pages[1], torch.empty(rows, dtype=torch.int64))
        summands = torch.empty(1, rows, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16)
        angles = torch.empty(2, rows, 1, head_dim, dtype=torch.bfloat16)

        def launch(
            summands: torch.Tensor = summands, angles: torch.Tensor = angles, write: KVWrite = write
        ) -> torch.Tensor:
            return attention_inputs(summands, angles[0], angles[1], heads, norm, write)

        (kernel,) = compile_launches(launch)
        found.append([line.split(",")[-2:] for line in kernel.ptx.splitlines() if "shfl.sync.bfly" in line])
        assert "bar.sync" not in kernel.ptx
        assert kernel.shared_bytes == 0
        assert not kernel.stack_bytes
    assert found[0] == found[1]
