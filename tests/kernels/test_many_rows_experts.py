"""Experts of a prompt's rows where there is no GPU: interpreted on the CPU, and compiled for Hopper."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton.many_rows_experts import expert_outputs
from support.kernels.interpreted import interpreted
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches

TOLERANCE = 1e-6
HIDDEN, WIDTH = 2816, 704


@pytest.mark.slow
def test_interpreted_kernels_equal_the_reference() -> None:
    lines = [line.split("\t") for line in interpreted("many_rows_experts").splitlines()]
    assert len(lines) == 5 * 3
    assert not [line for line in lines if not float(line[1]) < TOLERANCE]


@pytest.mark.parametrize("rows", [512, 4096])
@pytest.mark.parametrize("width", [WIDTH, WIDTH // 2])
def test_served_tiles_compile_for_hopper(rows: int, width: int) -> None:
    """The published width and that of two ranks."""
    weight = torch.empty(1, dtype=torch.bfloat16)
    found = compile_launches(
        lambda: expert_outputs(
            torch.empty(rows, HIDDEN, dtype=torch.bfloat16),
            torch.empty(128, rows, dtype=torch.int32),
            torch.empty(128, dtype=torch.int32),
            weight.expand(128, 2 * width, HIDDEN),
            weight.expand(128, HIDDEN, width),
            8,
        )
    )
    assert [kernel.name for kernel in found] == ["_gate_up_kernel", "_down_kernel"]
    for kernel in found:
        assert "wgmma.mma_async" in kernel.ptx
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        assert not kernel.stack_bytes, "registers spill"
