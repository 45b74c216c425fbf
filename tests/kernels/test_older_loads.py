"""What kernels load before they wait comes from the cache that all multiprocessors share (`early_start`)."""

from __future__ import annotations

import re
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton import few_attention, few_rows_experts, paged_attention, whole_attention, wide_attention
from support.kernels.triton_compile import Compiled, compile_launches

WAIT = "griddepcontrol.wait"
KINDS = {
    "attend_kernel": (8, 2, 128, None, 1),
    "attend_few_kernel": (8, 2, 256, 512, 1),
    "attend_whole_kernel": (32, 16, 256, 1024, 9),
    "wide_attend_kernel": (8, 2, 512, None, 1),
}
"""Query heads, KV heads, head dim, window and sequences of a call that a kernel serves."""


def attention(kernel: str) -> list[Compiled]:
    """What a decode step's attention is compiled to."""
    heads, kv_heads, head_dim, window, num_seqs = KINDS[kernel]
    q_TND = torch.empty(num_seqs, heads, head_dim, dtype=torch.bfloat16)
    pages = torch.empty(9, 16, kv_heads, head_dim, dtype=torch.bfloat16)
    tables = [torch.zeros(size, dtype=torch.int32) for size in ((num_seqs + 1, 250), (num_seqs + 2,), (num_seqs + 1,))]
    with ExitStack() as stack:
        for module in (few_attention, paged_attention, whole_attention, wide_attention):
            for name in ("starts_early", "on_hopper"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, return_value=True))
        return compile_launches(
            lambda: paged_attention.paged_attention(
                q_TND, pages, pages, *tables, window=window, causal=True, scale=1.0, most_rows=1
            )
        )


def loads(ptx: str) -> list[str]:
    return re.findall(r"ld\.global\S*", ptx)


@pytest.mark.parametrize("kernel", KINDS)
def test_attention_loads_older_numbers_from_the_shared_cache(kernel: str) -> None:
    attend, *others = attention(kernel)
    assert attend.name == kernel
    ptx = attend.ptx
    if kernel in ("attend_kernel", "attend_few_kernel"):
        ptx = ptx.split(WAIT)[0]
    # In the others, whose groups of warps wait each for itself, only queries are loaded behind the wait.
    older = [load for load in loads(ptx) if ".v4" not in load or kernel == "attend_few_kernel"]
    assert len(older) >= 3
    assert all(".cg" in load for load in older)
    for combine in others:
        before = loads(combine.ptx.split(WAIT)[0])
        assert before
        assert all(".cg" in load for load in before)


def test_experts_load_whose_rows_they_have_from_the_shared_cache() -> None:
    x_TH, experts_TK = torch.empty(2, 128, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int64)
    gate_up, down = torch.empty(4, 128, 128, dtype=torch.bfloat16), torch.empty(4, 128, 64, dtype=torch.bfloat16)
    with mock.patch.object(few_rows_experts, "starts_early", return_value=True):
        _, second = compile_launches(lambda: few_rows_experts.expert_outputs(x_TH, experts_TK, gate_up, down))
    before = loads(second.ptx.split(WAIT)[0])
    assert before
    assert all(".cg" in load for load in before)
