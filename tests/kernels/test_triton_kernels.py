"""The Triton kernels where there is no GPU: interpreted on the CPU, and compiled for Hopper."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from support.kernels.interpreted import interpreted
from support.kernels.kernel_parity import kernel_runs
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches

TOLERANCE = {"torch.float32": 3e-6, "torch.bfloat16": 4e-2, "layouts": 0.5, "router": 0.5, "bytes": 0.5}
"""By dtype: relative errors; of the others, which are counts: none."""


def test_interpreted_kernels_equal_the_references() -> None:
    lines = [line.split("\t") for line in interpreted("kernels").splitlines()]
    assert len(lines) == (11 + 3 + 7) + (3 + 1 + 7) + 4 + 3
    wrong = [(dtype, name, error) for dtype, name, error in lines if not float(error) < TOLERANCE[dtype]]
    assert not wrong


@pytest.mark.parametrize(
    ("rows", "pages_dtype", "most_keys"),
    [
        *((rows, torch.bfloat16, None) for rows in (1, 5, 16, 300)),
        (300, torch.bfloat16, 600),
        (5, torch.float8_e4m3fn, None),
        (300, torch.float8_e4m3fn, None),
        (300, torch.float8_e4m3fn, 600),
    ],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "causal"),
    [(32, 16, 256, 1024, True), (32, 4, 512, None, True), (8, 1, 256, 512, True), (64, 8, 128, 2048, False)],
    ids=["31B sliding", "31B full", "E2B sliding", "DFlash"],
)
def test_attention_compiles_for_hopper(
    rows: int,
    pages_dtype: torch.dtype,
    most_keys: int | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    causal: bool,
) -> None:
    from gemray_kernels.triton.paged_attention import paged_attention

    q_TND = torch.empty(rows, heads, head_dim, dtype=torch.bfloat16)
    pages = torch.empty(9, 16, kv_heads, head_dim, dtype=pages_dtype)
    table_SP = torch.zeros(1, 250, dtype=torch.int32)
    start_Z, kv_len_S = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([600], dtype=torch.int32)
    found = compile_launches(
        lambda: paged_attention(
            q_TND,
            pages,
            pages,
            table_SP,
            start_Z,
            kv_len_S,
            window=window,
            causal=causal,
            scale=1.0,
            most_keys=most_keys,
        )
    )
    in_two = head_dim > 256 and most_keys is not None
    long = ["attend_weights_kernel", "attend_values_kernel"] if in_two else ["attend_long_kernel"]
    assert [kernel.name for kernel in found] == ["attend_kernel", "combine_kernel"] + (long if rows > 32 else [])
    for kernel in found:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        # `prompt_tiles` says why some of the values' kernel may.
        spilled = 256 if kernel.name == "attend_values_kernel" else 192
        assert kernel.stack_bytes is None or kernel.stack_bytes <= spilled, "registers spill"
        if kernel.name != "combine_kernel":
            assert "wgmma" in kernel.ptx or "mma.sync" in kernel.ptx
            assert "cp.async" in kernel.ptx, "pages are not loaded ahead of their use"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_other_kernels_compile_for_hopper(dtype: torch.dtype) -> None:
    from gemray_kernels.table import triton_kernels

    kernels = triton_kernels()
    runs = kernel_runs("cpu", 0, rows=8, width=2816, heads=16, kv_heads=8, head_dim=256, experts=16, top_k=8)
    compiled = {name: compile_launches(partial(run, kernels, dtype)) for name, run in runs.items()}
    assert {name: len(found) for name, found in compiled.items() if name != "gated_experts"} == {
        name: 1 for name in compiled if name != "gated_experts"
    }
    assert [kernel.name for kernel in compiled["gated_experts"]] == [
        "_gate_up_kernel",
        "_down_kernel",
        "_weighted_sum_kernel",
    ]
    for found in compiled.values():
        assert all(kernel.shared_bytes <= MAX_SHARED_BYTES and (kernel.stack_bytes or 0) <= 16 for kernel in found)
