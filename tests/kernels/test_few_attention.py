"""Attention of few programs: which calls have it, and what it is compiled to."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.fp8_kv import FP8
from gemray_kernels.triton import few_attention
from gemray_kernels.triton.few_attention import FewTile, few_tile
from gemray_kernels.triton.paged_attention import paged_attention
from support.kernels.triton_compile import Compiled, compile_launches

WAIT = "griddepcontrol.wait"
LETS = "griddepcontrol.launch_dependents"
SIXTEEN_BYTES = "ld.global.cg.v4"
HEADS = {"31B": (32, 16, 1024), "26B-A4B": (16, 8, 1024), "E4B": (8, 2, 512), "E2B": (8, 1, 512)}


def tile(name: str, num_seqs: int, rows: int, *, on_hopper: bool = True, **other: Any) -> FewTile | None:
    """The tile of so many sequences, and the null slot, of so many rows each."""
    heads, kv_heads, window = HEADS[name]
    q_TND = torch.empty(num_seqs * rows, heads, other.pop("head_dim", 256), dtype=other.pop("dtype", torch.bfloat16))
    pages_dtype, page_size = other.pop("pages_dtype", q_TND.dtype), other.pop("page_size", 16)
    k_pages = torch.empty(2, page_size, kv_heads, q_TND.shape[2], dtype=pages_dtype)
    options = {"window": window, "causal": True, "most_rows": rows} | other
    with mock.patch.object(few_attention, "starts_early", return_value=on_hopper):
        return few_tile(q_TND, k_pages, num_seqs + 1, **options)


def programs(name: str, num_seqs: int, rows: int, *, reader_comes_ahead: bool = False) -> list[Compiled]:
    """What attention of such a batch is compiled to."""
    heads, kv_heads, window = HEADS[name]
    q_TND = torch.empty(num_seqs * rows, heads, 256, dtype=torch.bfloat16)
    pages = torch.empty(9, 16, kv_heads, 256, dtype=torch.bfloat16)
    table_SP = torch.zeros(num_seqs + 1, 250, dtype=torch.int32)
    start_Z, kv_len_S = torch.zeros(num_seqs + 2, dtype=torch.int32), torch.zeros(num_seqs + 1, dtype=torch.int32)
    with mock.patch.object(few_attention, "starts_early", return_value=True):
        return compile_launches(
            lambda: paged_attention(
                q_TND, pages, pages, table_SP, start_Z, kv_len_S,
                window=window, causal=True, scale=1.0, most_rows=rows,
                reader_comes_ahead=reader_comes_ahead,
            )
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "num_seqs", "rows", "expected"),
    [
        ("31B", 1, 1, FewTile(8, 4)),
        ("31B", 2, 1, FewTile(8, 4)),
        ("31B", 3, 1, None),
        ("31B", 1, 5, FewTile(16, 4)),
        ("31B", 2, 5, None),
        ("31B", 1, 16, FewTile(16, 4)),
        ("31B", 1, 33, None),
        ("26B-A4B", 1, 1, FewTile(8, 2)),
        ("26B-A4B", 2, 1, FewTile(8, 4)),
        ("26B-A4B", 4, 1, FewTile(8, 4)),
        ("E4B", 4, 1, FewTile(8, 2)),
        ("E4B", 16, 1, FewTile(8, 4)),
        ("E4B", 4, 5, FewTile(16, 4)),
        ("E4B", 8, 5, None),
        ("E2B", 1, 5, FewTile(16, 4)),
        ("E2B", 32, 1, FewTile(8, 4)),
        ("E2B", 33, 1, None),
    ],
)
def test_few_programs_are_those_that_were_measured_faster(
    name: str, num_seqs: int, rows: int, expected: FewTile | None
) -> None:
    assert tile(name, num_seqs, rows) == expected


@pytest.mark.parametrize(
    "other",
    [
        {"on_hopper": False},
        {"dtype": torch.float32},
        {"pages_dtype": FP8},
        {"page_size": 8},
        {"head_dim": 128},
        {"window": None},
        {"causal": False},
    ],
    ids=str,
)
def test_other_calls_have_other_kernels(other: dict[str, Any]) -> None:
    assert tile("31B", 1, 1, **other) is None


@pytest.mark.parametrize(("name", "num_seqs", "rows"), [("31B", 1, 1), ("26B-A4B", 1, 1), ("E2B", 1, 5)])
def test_programs_ask_for_all_old_keys_before_they_wait(name: str, num_seqs: int, rows: int) -> None:
    """A thread asks for 32 times 8 numbers of keys and values; for its share of the rows' own, masked, behind the wait.

    From registers they are multiplied: nothing but scores goes through shared memory.
    """
    attend, combine = programs(name, num_seqs, rows)
    assert (attend.name, combine.name) == ("attend_few_kernel", "combine_kernel")
    assert attend.ptx.index(LETS) < attend.ptx.index("ld.global") < attend.ptx.index(WAIT)
    *before, after = attend.ptx.split(WAIT)
    assert sum(part.count(SIXTEEN_BYTES) for part in before) == 32
    chosen = tile(name, num_seqs, rows)
    assert chosen is not None
    assert after.count(SIXTEEN_BYTES) == 32 + 32  # and a chunk's further tiles
    assert after.count("ld.global.v4") == chosen.pairs, "queries"
    assert "ld.global.b16" not in attend.ptx
    assert "ldmatrix" not in attend.ptx
    assert "cp.async" not in attend.ptx
    assert attend.shared_bytes <= 4096
    assert attend.stack_bytes is None or attend.stack_bytes <= 32, "registers spill"
    assert not attend.lost_products


@pytest.mark.parametrize("reader_comes_ahead", [False, True])
def test_a_product_that_asks_for_its_weight_first_starts_with_the_last_kernel(reader_comes_ahead: bool) -> None:
    _, combine = programs("31B", 1, 1, reader_comes_ahead=reader_comes_ahead)
    assert combine.ptx.count(LETS) == combine.ptx.count(WAIT) == 1
    assert (combine.ptx.index(LETS) < combine.ptx.index(WAIT)) == reader_comes_ahead
