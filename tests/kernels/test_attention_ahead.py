"""What attention's programs do before they wait for the kernel before them, as compiled for Hopper."""

from __future__ import annotations

import re
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


def programs() -> list[Compiled]:
    """The programs of a decode step of 31B's sliding layers."""
    q_TND = torch.empty(1, 32, 256, dtype=torch.bfloat16)
    pages = torch.empty(9, 16, 16, 256, dtype=torch.bfloat16)
    table_SP = torch.zeros(1, 250, dtype=torch.int32)
    start_Z, kv_len_S = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([600], dtype=torch.int32)
    with mock.patch.object(module, "starts_early", return_value=True):
        return compile_launches(
            lambda: module.paged_attention(
                q_TND, pages, pages, table_SP, start_Z, kv_len_S, window=1024, causal=True, scale=1.0
            )
        )


def test_programs_read_lengths_before_they_wait_and_keys_behind() -> None:
    attend, combine = programs()
    before, after = attend.ptx.split(WAIT)
    assert "ld.global" in before
    assert "cp.async.cg" not in before
    assert "cp.async.cg" in after
    assert not attend.stack_bytes, "registers spill"
    assert "ld.global" in combine.ptx.split(WAIT)[0], "lengths are older than what the kernel before wrote"


def test_programs_with_nothing_to_do_end_without_waiting() -> None:
    """They make room at once. Which is the first one, that waits all the same, is looked up in all three dimensions."""
    attend, combine = programs()
    before, after = attend.ptx.split(WAIT)
    end = re.search(r"^(\$L\w+):[^\n]*\n\s*ret;", after, re.MULTILINE)
    assert end is not None
    assert re.search(rf"bra \t{re.escape(end[1])};", before)
    assert all(f"%ctaid.{axis}" in before for axis in "xyz")
    assert "bra" not in combine.ptx.split(WAIT)[0], "the kernel behind waits for all programs of this one"


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
