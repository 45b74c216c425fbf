"""Memory that attention calls share: enough for every call up to a step's, side by side, and not needed."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels import attention_scratch
from gemray_kernels.attention_scratch import FEW_CALL_PAIRS, AttentionShape, carved, scratch_bytes
from gemray_kernels.numerics import Numerics
from gemray_kernels.triton.few_attention import MOST_PROGRAMS
from gemray_workers.attention.kernels import attention_kernel
from gemray_workers.messages import Choice

CPU = torch.device("cpu")
SHAPES = {
    "31B sliding": AttentionShape(32, 16, 256, 1024, 8192),
    "31B full": AttentionShape(32, 4, 512, None, 8192),
    "31B full, short": AttentionShape(32, 4, 512, None, 96),
    "26B-A4B full": AttentionShape(16, 2, 512, None, 65536),
    "E2B full": AttentionShape(8, 1, 512, None, 16384),
    "E2B sliding": AttentionShape(8, 1, 256, 512, 16384),
    "E4B sliding": AttentionShape(8, 2, 256, 512, 16384),
    "three heads a KV head": AttentionShape(6, 2, 512, None, 12000),
}
LEFT_BEHIND = {
    "attend_kernel": (7, 8),
    "attend_few_kernel": (7, 8),
    "combine_kernel": (1, 2),
    "attend_weights_kernel": (5, 6, 7),
    "attend_values_kernel": (4, 5, 6, 7),
}
"""Places of a kernel's arguments that it leaves for the next one, or has from the one before."""


def test_tensors_lie_side_by_side() -> None:
    scratch = torch.empty(4096, dtype=torch.uint8)
    one, two, three = carved(scratch, CPU, ((3, 5), torch.float32), ((7,), torch.bfloat16), ((0, 4), torch.float32))
    assert (one.shape, two.shape, three.shape) == ((3, 5), (7,), (0, 4))
    assert (one.dtype, two.dtype) == (torch.float32, torch.bfloat16)
    one.fill_(1.0)
    two.fill_(2.0)
    assert one.eq(1).all()
    first = scratch.data_ptr()
    assert first <= one.data_ptr() < one.data_ptr() + one.nbytes <= two.data_ptr() <= first + 4096 - two.nbytes
    assert (one.data_ptr() - first) % 16 == (two.data_ptr() - first) % 16 == 0


@pytest.mark.parametrize("scratch", [None, torch.empty(511, dtype=torch.uint8)])
def test_what_does_not_fit_has_memory_of_its_own(scratch: Tensor | None) -> None:
    one, two = carved(scratch, CPU, ((64,), torch.float32), ((64,), torch.float32))
    one.fill_(1.0)
    two.fill_(2.0)
    assert one.eq(1).all()
    assert scratch is None or not lies_in(one, scratch)


@pytest.mark.parametrize("name", SHAPES)
def test_no_call_up_to_the_largest_takes_memory_of_its_own(name: str) -> None:
    shape = SHAPES[name]
    rng = random.Random(name)
    for _ in range(40):
        most_rows, most_seqs = rng.choice((5, 8, 160, 512, 1184, 2048)), rng.choice((2, 9, 33))
        scratch = torch.empty(scratch_bytes(shape, most_rows, most_seqs, 2), dtype=torch.uint8)
        for rows, seqs in ((most_rows, most_seqs), (rng.randint(1, most_rows), rng.randint(1, most_seqs))):
            found = left_behind(shape, rows, seqs, rng.choice((None, 40, 3000, 8192, 10**6)), scratch)
            outside = [where for where, tensor in found if tensor.numel() > 1 and not lies_in(tensor, scratch)]
            assert not outside, (rows, seqs, most_rows, most_seqs)


def test_room_is_for_as_many_pairs_as_few_programs_hold() -> None:
    """The number stands apart from the rule that it follows from, as ranks without Triton count with it."""
    assert 2 * max(pairs * programs for pairs, programs in MOST_PROGRAMS.items()) == FEW_CALL_PAIRS


def test_a_prompt_of_usual_length_takes_one_round() -> None:
    """Fewer keys at a time would launch kernels more often and carry sums from one to the next."""
    for shape in (SHAPES["26B-A4B full"], SHAPES["E2B full"]):
        scratch = torch.empty(scratch_bytes(shape, 1024, 2, 2), dtype=torch.uint8)
        names = [name for (name, _), _ in left_behind(shape, 1024, 2, attention_scratch.USUAL_PROMPT, scratch)]
        assert names.count("attend_weights_kernel") == len(LEFT_BEHIND["attend_weights_kernel"])


def test_no_chunk_of_exact_numerics_lies_in_two_rounds() -> None:
    from gemray_kernels.triton.exact_softmax import LARGE_CHUNK

    assert attention_scratch.ROUND_KEYS % LARGE_CHUNK.value == 0


@pytest.mark.parametrize("numerics", list(Numerics))
def test_kernels_of_a_rank_are_given_the_memory(numerics: Numerics) -> None:
    scratch = torch.empty(16, dtype=torch.uint8)
    kernel: Any = attention_kernel(Choice("attention", "triton", "asked for"), numerics, scratch)
    assert kernel.keywords == {"scratch": scratch}
    torch_choice = Choice("attention", "torch", "on a CPU")
    assert attention_kernel(torch_choice, numerics, scratch) is attention_kernel(torch_choice, numerics)


def left_behind(
    shape: AttentionShape, rows: int, seqs: int, most_keys: int | None, scratch: Tensor
) -> list[tuple[tuple[str, int], Tensor]]:
    """What the kernels of a call leave for each other, by kernel and argument."""
    from triton.runtime.jit import JITFunction

    from gemray_kernels.triton import few_attention
    from gemray_kernels.triton.paged_attention import paged_attention

    found: list[tuple[tuple[str, int], Tensor]] = []

    def run(kernel: Any, *arguments: Any, **_: Any) -> None:
        found.extend(((kernel.__name__, i), arguments[i]) for i in LEFT_BEHIND.get(kernel.__name__, ()))

    pages = torch.empty(1, 16, shape.num_kv_heads, shape.head_dim, dtype=torch.bfloat16)
    on_hopper = mock.patch.object(few_attention, "starts_early", return_value=True)
    with on_hopper, mock.patch.object(JITFunction, "run", run):
        paged_attention(
            torch.empty(rows, shape.num_heads, shape.head_dim, dtype=torch.bfloat16),
            pages,
            pages,
            torch.zeros(seqs, shape.table_keys // 16, dtype=torch.int32),
            torch.zeros(seqs + 1, dtype=torch.int32),
            torch.zeros(seqs, dtype=torch.int32),
            window=shape.window,
            causal=True,
            scale=1.0,
            most_keys=most_keys,
            scratch=scratch,
        )
    return found


def lies_in(tensor: Tensor, memory: Tensor) -> bool:
    first = memory.data_ptr()
    return first <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= first + memory.nbytes
