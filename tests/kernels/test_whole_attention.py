"""Attention with all keys of a sequence and KV head in one program: when it serves, and what it is compiled to."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.fp8_kv import FP8
from gemray_kernels.triton import whole_attention
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.paged_attention import paged_attention
from support.kernels.triton_compile import MAX_SHARED_BYTES, Compiled, compile_launches, loop_of

WHOLE, PARTS = ["attend_whole_kernel"], ["attend_kernel", "combine_kernel"]
MULTIPROCESSOR_SHARED_BYTES = 228 * 1024
MULTIPROCESSOR_REGISTERS = 65536


def programs(
    num_seqs: int = 8,
    rows: int = 5,
    *,
    heads: int = 32,
    kv_heads: int = 16,
    head_dim: int = 256,
    page_size: int = 16,
    window: int | None = 1024,
    causal: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    pages_dtype: torch.dtype = torch.bfloat16,
    most_rows: int | None = None,
    on_hopper: bool = True,
) -> list[Compiled]:
    """What an attention of so many sequences and the null slot launches."""
    q_TND = torch.empty(num_seqs * rows, heads, head_dim, dtype=dtype)
    pages = torch.empty(9, page_size, kv_heads, head_dim, dtype=pages_dtype)
    table_SP = torch.zeros(num_seqs + 1, 250, dtype=torch.int32)
    start_Z, kv_len_S = (torch.zeros(num_seqs + more, dtype=torch.int32) for more in (2, 1))
    with (
        mock.patch.object(whole_attention, "on_hopper", return_value=on_hopper),
        mock.patch.object(whole_attention, "starts_early", return_value=True),
    ):
        return compile_launches(
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
                most_rows=most_rows or rows,
            )
        )


@pytest.mark.parametrize(
    ("batch", "kernels"),
    [
        ({}, WHOLE),
        ({"rows": 1}, WHOLE),
        ({"rows": 16}, WHOLE),
        ({"num_seqs": 2}, WHOLE),
        ({"num_seqs": 1}, PARTS),  # 32 programs, the null slot's among them
        ({"num_seqs": 16, "heads": 8, "kv_heads": 2, "window": 512}, WHOLE),
        ({"num_seqs": 8, "heads": 8, "kv_heads": 2, "window": 512}, PARTS),
        ({"num_seqs": 8, "heads": 8, "kv_heads": 2, "window": 512, "rows": 16}, WHOLE),  # two blocks of rows
        ({"window": None}, PARTS),
        ({"causal": False}, WHOLE),
        ({"pages_dtype": FP8}, PARTS),
        ({"dtype": torch.float32, "pages_dtype": torch.float32}, PARTS),
        ({"page_size": 32}, PARTS),
        ({"head_dim": 128}, WHOLE),
        ({"head_dim": 64}, PARTS),
        ({"head_dim": 128, "window": None, "causal": False}, PARTS),  # a DFlash block's full layer
        ({"heads": 48}, PARTS),  # three query heads a KV head
        ({"on_hopper": False}, PARTS),
        ({"rows": 40}, [*PARTS, "attend_long_kernel"]),
    ],
    ids=str,
)
def test_which_kernel_serves(batch: dict[str, Any], kernels: list[str]) -> None:
    assert [kernel.name for kernel in programs(**batch)] == kernels


@pytest.mark.parametrize(("rows", "pairs"), [(5, 16), (8, 16), (16, 32), (32, 32)])
@pytest.mark.parametrize("num_seqs", [8, 9])
def test_programs_beyond_the_multiprocessors_share_them(num_seqs: int, rows: int, pairs: int) -> None:
    (kernel,) = programs(num_seqs, rows)
    if num_seqs * 16 > MULTIPROCESSORS:
        assert 2 * (kernel.shared_bytes + 1024) <= MULTIPROCESSOR_SHARED_BYTES
        assert kernel.registers is None or 2 * 256 * kernel.registers <= MULTIPROCESSOR_REGISTERS
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert not kernel.stack_bytes or kernel.stack_bytes <= 64, "registers spill"
    assert not kernel.lost_products
    # Of each product every step is under way at one time: keys by queries of both halves, then both halves of values.
    assert kernel.product_waits in (2, None)
    assert products_of(kernel) == [str(pairs)] * (256 // 16 + 4 * 64 // 16)


@pytest.mark.parametrize(("num_seqs", "heads", "rows", "pairs"), [(8, 64, 16, 32), (4, 32, 8, 32), (32, 64, 2, 64)])
@pytest.mark.parametrize("causal", [True, False])
def test_programs_of_a_drafters_block(num_seqs: int, heads: int, rows: int, pairs: int, causal: bool) -> None:
    """Heads of 128 have half the sums, so that one of many programs holds twice as many pairs."""
    (kernel,) = programs(num_seqs, rows, heads=heads, kv_heads=8, head_dim=128, window=2048, causal=causal)
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert not kernel.stack_bytes or kernel.stack_bytes <= 64, "registers spill"
    assert not kernel.lost_products
    assert kernel.product_waits in (2, None)
    assert products_of(kernel) == [str(pairs)] * (128 // 16 + 2 * 64 // 16)


def products_of(kernel: Compiled) -> list[str]:
    """Pairs of each product of a tile of keys."""
    return re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16", loop_of(kernel.ptx))


def test_a_program_stores_and_lets_the_next_kernel_start_only_when_the_one_before_has_ended() -> None:
    (kernel,) = programs()
    waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", kernel.ptx)]
    assert len(waits) >= 2, "the warps that attend, and the one that fetches"
    assert waits[0] < kernel.ptx.index("griddepcontrol.launch_dependents") < kernel.ptx.index("st.global")
    assert kernel.ptx.count("cp.async.bulk.tensor") == 4 + 2 * 4 * 4, "queries; a tile's keys and values"
