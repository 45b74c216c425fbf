"""What attention's programs do before they wait for the kernel before them, as compiled for Hopper."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton import paged_attention as module
from support.kernels.triton_compile import Compiled, compile_launches

WAIT = "griddepcontrol.wait"
ASKS = "cp.async.bulk.prefetch"


def programs(ahead: int | None, most_registers: int | None = None) -> list[Compiled]:
    """The programs of a decode step of 31B's sliding layers."""
    q_TND = torch.empty(1, 32, 256, dtype=torch.bfloat16)
    pages = torch.empty(9, 16, 16, 256, dtype=torch.bfloat16)
    table_SP = torch.zeros(1, 250, dtype=torch.int32)
    start_Z, kv_len_S = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([600], dtype=torch.int32)
    tile = replace(module.short_tile(torch.bfloat16, 256, 2, 2, 1), ahead=ahead, most_registers=most_registers)
    with mock.patch.object(module, "starts_early", return_value=True):
        return compile_launches(
            lambda: module.paged_attention(
                q_TND, pages, pages, table_SP, start_Z, kv_len_S, window=1024, causal=True, scale=1.0, tile=tile
            )
        )


@pytest.mark.parametrize(("ahead", "asked"), [(None, 0), (0, 0), (32, 2), (64, 4)])
def test_programs_ask_for_so_many_keys_before_they_wait(ahead: int | None, asked: int) -> None:
    """A thread asks for one line of a key and one of a value at a time; keys and queries are read later."""
    attend, combine = programs(ahead)
    before, after = attend.ptx.split(WAIT)
    assert before.count(ASKS) == asked
    assert after.count(ASKS) == 0
    assert ("ld.global" in before) == (ahead is not None), "lengths, and where keys are asked for the table"
    assert "cp.async.cg" not in before
    assert "cp.async.cg" in after
    assert not attend.stack_bytes, "registers spill"
    assert "ld.global" in combine.ptx.split(WAIT)[0], "lengths are older than what the kernel before wrote"


def test_a_tile_holds_its_programs_to_so_many_registers() -> None:
    attend, combine = programs(64, 96)
    assert attend.registers is None or attend.registers <= 96
    assert combine.registers == programs(None)[1].registers
