"""The fused kernels where there is no GPU: interpreted on the CPU, and compiled for Hopper."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from support.kernels.fused_parity import fused_runs
from support.kernels.interpreted import interpreted
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches

TOLERANCE = 1e-6
ROUNDS_EACH_STEP = ("attention_inputs", "per_layer_inputs")
"""Where products that are rounded to bfloat16 stand before sums."""


def test_interpreted_kernels_equal_the_references() -> None:
    lines = [line.split("\t") for line in interpreted("fused_kernels").splitlines()]
    names = fused_runs("cpu", 0, rows=1, width=8, heads=2, kv_heads=1, head_dim=8, experts=4, top_k=2).keys()
    assert [name for name, _ in lines] == list(names)
    assert not [line for line in lines if not float(line[1]) < TOLERANCE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_kernels_compile_for_hopper(dtype: torch.dtype) -> None:
    from gemray_kernels.table import triton_kernels

    kernels = triton_kernels()
    runs = fused_runs("cpu", 0, rows=8, width=2816, heads=16, kv_heads=8, head_dim=256, experts=16, top_k=8)
    compiled = {name: compile_launches(partial(run, kernels, dtype)) for name, run in runs.items()}
    in_two = {"expert_outputs"} | ({"gated_projection, many inputs"} if dtype == torch.bfloat16 else set())
    assert {name for name, found in compiled.items() if len(found) != 1} == in_two
    for name, found in compiled.items():
        assert found, name
        assert all(kernel.shared_bytes <= MAX_SHARED_BYTES and not kernel.stack_bytes for kernel in found), name
        if name.startswith(ROUNDS_EACH_STEP):
            # Without ".rn" the assembler may fuse a product that was to be rounded with the sum behind it.
            assert not re.search(r"(fma|mul|add)(?!\.rn)[\w.]*\.bf16|fma[\w.]*bf16", found[0].ptx), name
    assert "cos.approx" not in compiled["rope_tables"][0].ptx, "angles reach 262,143"
