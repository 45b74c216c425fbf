"""Exact attention's Triton kernels where there is no GPU: interpreted on the CPU, and compiled for Hopper."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from support.kernels.interpreted import interpreted
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches

FEW_ROWS = ["attend_exact_kernel", "combine_exact_kernel"]
PROMPTS = ["attend_weights_kernel", "attend_values_kernel"]


@pytest.mark.slow
def test_interpreted_kernels_are_right_and_exact() -> None:
    lines = [line.split("\t") for line in interpreted("exact_attention").splitlines()]
    assert [kind for kind, _, _ in lines] == ["error"] * 10 + ["differences"] * 13 + ["fault"] * 3
    for kind, name, number in lines:
        expected = {"error": float(number) < 1e-6, "differences": number == "0", "fault": number != "0"}[kind]
        assert expected, (kind, name, number)


@pytest.mark.parametrize("pages_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [(32, 16, 256, 1024), (32, 4, 512, None)],
    ids=["31B sliding", "31B full"],
)
def test_it_compiles_for_hopper(
    heads: int, kv_heads: int, head_dim: int, window: int | None, rows: int, pages_dtype: torch.dtype
) -> None:
    from gemray_kernels.triton.exact_attention import exact_paged_attention

    q_TND = torch.empty(rows, heads, head_dim, dtype=torch.bfloat16)
    pages = torch.empty(9, 16, kv_heads, head_dim, dtype=pages_dtype)
    table_SP = torch.zeros(1, 250, dtype=torch.int32)
    start_Z, kv_len_S = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([600], dtype=torch.int32)
    found = compile_launches(
        lambda: exact_paged_attention(
            q_TND, pages, pages, table_SP, start_Z, kv_len_S, window=window, causal=True, scale=1.0
        )
    )
    rounds = 1 if window else 2  # small chunks, then the others
    assert [kernel.name for kernel in found] == FEW_ROWS + (PROMPTS * rounds if rows > 32 else [])
    for kernel in found:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        assert kernel.stack_bytes is None or kernel.stack_bytes <= 192, "registers spill"
        assert "kWidth = 4" not in kernel.layouts, "inputs of mma.sync in another order"
        if kernel.name in PROMPTS:
            assert "wgmma" in kernel.ptx
