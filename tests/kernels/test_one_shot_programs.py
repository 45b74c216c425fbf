"""The program that adds up over ranks: interpreted by processes that share memory, and compiled.

It moves 16 bytes at a time where a tensor allows it: links between devices are slow with less.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton.one_shot_reduce import BLOCK_BYTES, MOST_BYTES, OneShotReduce, blocks_of, memory_words
from support.kernels.interpreted import interpreted
from support.kernels.triton_compile import compile_launches


def test_processes_that_share_memory_have_the_sums_of_all() -> None:
    """Turn after turn, ranks ahead of each other: with one slot for two, or flags of this turn alone, it fails."""
    assert interpreted("one_shot") == "".join(f"{size} ranks: 60 turns\n" for size in (1, 2, 3, 4))


def accesses(size: int, parts: int, count: int, dtype: torch.dtype) -> list[str]:
    """Loads from the slots and stores to memory of the program for one sum."""
    add_up = OneShotReduce(0, size, torch.zeros(size, dtype=torch.int64))
    x = torch.empty(parts, count, dtype=dtype)
    launch: Callable[[], object] = lambda: add_up.of_parts(x, torch.bfloat16)  # noqa: E731
    (program,) = compile_launches(launch)
    assert program.stack_bytes in (0, None)
    return re.findall(r"(?:ld\.volatile|st)\.global\.(v\d\.b\d+|b\d+)", program.ptx)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("parts", "dtype"), [(1, torch.bfloat16), (1, torch.float32), (4, torch.float32)])
def test_all_of_a_block_moves_in_16_bytes(size: int, parts: int, dtype: torch.dtype) -> None:
    found = accesses(size, parts, 40 * 5376, dtype)
    # Beside the block, a program reads and writes one number: its turn.
    assert sorted(x for x in found if x not in {"v4.b32", "v2.b32"}) == ["b32", "b32"]
    assert found.count("v4.b32") >= 2 * size


def test_odd_counts_move_number_by_number() -> None:
    assert "b16" in accesses(2, 1, 1023, torch.bfloat16)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_what_is_taken_fits_its_slots(size: int) -> None:
    add_up = OneShotReduce(0, size, torch.zeros(size, dtype=torch.int64))
    most = blocks_of(size) * BLOCK_BYTES // 2
    assert add_up.takes(torch.empty(most, dtype=torch.bfloat16, device="meta"))
    assert not add_up.takes(torch.empty(most + 1, dtype=torch.bfloat16, device="meta"))
    assert not add_up.takes(torch.empty(8, dtype=torch.float64, device="meta"))
    assert 2 * size * (2 * most) <= 4 * memory_words(size) < 4 * MOST_BYTES + (1 << 17)
