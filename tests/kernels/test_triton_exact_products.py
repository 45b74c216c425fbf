"""Exact products in Triton where there is no GPU: interpreted on the CPU, and compiled for Hopper."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.numerics import Numerics
from support.kernels.interpreted import interpreted
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches


def test_interpreted_products_are_the_references() -> None:
    assert interpreted("exact_products").splitlines() == ["done"]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_only_hopper_is_known_to_add_up_in_one_order(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemray_kernels.table import EXACT_REFERENCE, kernels_for, triton_exact_products

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    products = kernels_for(torch.device("cuda"), torch.bfloat16, Numerics.EXACT).exact
    assert products == (triton_exact_products() if capability == (9, 0) else EXACT_REFERENCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 32, 64, 300])
def test_exact_products_compile_for_hopper(rows: int, dtype: torch.dtype) -> None:
    """26B-A4B's: leaves of 264 inputs, which no tile divides, and whole ones."""
    from gemray_kernels.triton.exact_products import linear, summands

    down, qkv = torch.empty(2816, 2112, dtype=dtype), torch.empty(8192, 2816, dtype=dtype)
    found = compile_launches(lambda: summands(torch.empty(rows, 2112, dtype=dtype), down, 8))
    found += compile_launches(lambda: linear(torch.empty(rows, 2112, dtype=dtype), down, 8))
    found += compile_launches(lambda: summands(torch.empty(rows, 2816, dtype=dtype), qkv, 1))
    assert len(found) >= 3
    for kernel in found:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        assert not kernel.stack_bytes, "registers spill"
        if dtype == torch.bfloat16:
            assert "wgmma" in kernel.ptx or "mma.sync" in kernel.ptx
            assert "cp.async" in kernel.ptx, "weights are not loaded ahead of their use"
