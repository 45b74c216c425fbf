"""What attention's programs do before they wait for the kernel before them, as compiled for Hopper."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.triton import attention_inputs as inputs_module
from gemray_kernels.triton import paged_attention as module
from support.kernels.triton_compile import Compiled, compile_launches

WAIT = "griddepcontrol.wait"
LETS = "griddepcontrol.launch_dependents"
ASKS = "cp.async.bulk.prefetch"


def programs(ahead: int = 0, most_registers: int | None = None) -> list[Compiled]:
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


@pytest.mark.parametrize(("ahead", "asked"), [(0, 0), (32, 2), (64, 4)])
def test_programs_ask_for_so_many_keys_before_they_wait(ahead: int, asked: int) -> None:
    """A thread asks for one line of a key and one of a value at a time; keys and queries are read later."""
    attend, combine = programs(ahead)
    before, after = attend.ptx.split(WAIT)
    assert before.count(ASKS) == asked
    assert after.count(ASKS) == 0
    assert "ld.global" in before, "lengths, and where keys are asked for the table"
    assert "cp.async.cg" not in before
    assert "cp.async.cg" in after
    assert not attend.stack_bytes, "registers spill"
    assert "ld.global" in combine.ptx.split(WAIT)[0], "lengths are older than what the kernel before wrote"


def test_attention_lets_its_second_kernel_start_before_it_waits_and_that_one_nothing() -> None:
    """The kernel behind attention may rely on there being no others than itself and attention's second one."""
    attend, combine = programs()
    assert attend.ptx.index(LETS) < attend.ptx.index("ld.global") < attend.ptx.index(WAIT)
    assert combine.ptx.index(WAIT) < combine.ptx.index(LETS)


def test_attention_inputs_let_attention_start_before_they_wait() -> None:
    norm, pages = Norm(torch.empty(256, dtype=torch.bfloat16), 1e-6), torch.empty(9, 16, 16, 256, dtype=torch.bfloat16)
    angles = torch.empty(1, 1, 256, dtype=torch.bfloat16)
    write = KVWrite(norm, True, pages, pages, torch.zeros(1, dtype=torch.int32))
    summands = torch.empty(1, 1, 64 * 256, dtype=torch.bfloat16)
    with mock.patch.object(inputs_module, "starts_early", return_value=True):
        [inputs] = compile_launches(lambda: inputs_module.attention_inputs(summands, angles, angles, 32, norm, write))
    assert inputs.ptx.count(LETS) == 1
    assert inputs.ptx.index(LETS) < inputs.ptx.index(WAIT)


def test_a_tile_holds_its_programs_to_so_many_registers() -> None:
    attend, combine = programs(64, 96)
    assert attend.registers is None or attend.registers <= 96
    assert combine.registers == programs()[1].registers
