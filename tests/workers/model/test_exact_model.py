"""The target model in exact numerics: logits are the same bits however rows are cut into steps, on 1, 2 and 4 ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemray_kernels import table
from gemray_kernels.numerics import Numerics
from gemray_kernels.reference import exact_linear
from gemray_workers.parallel.communicator import SoloCommunicator
from support.checkpoints.tiny import SHAPES, VOCAB_SIZE, WINDOW, Shape, tiny_checkpoint
from support.oracles.gang_logits import logits_on_rank
from support.oracles.oracle import load_model, prompt_logits, solo_model
from support.processes.gang import RunOnGang

NUM_ADDED = 16
PROMPT = [int(i) for i in torch.randint(VOCAB_SIZE, (3 * WINDOW + 3,), generator=torch.Generator().manual_seed(3))]
CHUNKS = ([1] * len(PROMPT), [2, 11, 1, 13], [len(PROMPT) - 1, 1])


def logits(shape: Shape, chunks: list[int] | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    return prompt_logits(solo_model(tiny_checkpoint(shape), dtype, Numerics.EXACT), PROMPT, chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_every_chunk(shape: Shape, dtype: torch.dtype) -> None:
    whole = logits(shape, dtype=dtype)
    for chunks in CHUNKS:
        assert torch.equal(logits(shape, chunks, dtype), whole), chunks


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_those_of_fast_numerics_up_to_rounding(shape: Shape) -> None:
    fast = prompt_logits(solo_model(tiny_checkpoint(shape), torch.float64), PROMPT)
    assert (logits(shape).double() - fast).abs().max() < 1e-4


@pytest.mark.parametrize("added", [0, NUM_ADDED])
@pytest.mark.parametrize("size", [2, 4])
def test_logits_have_the_same_bits_on_any_number_of_ranks(run_on_gang: RunOnGang, size: int, added: int) -> None:
    directories = [tiny_checkpoint(s, vocab_size=VOCAB_SIZE + added, num_added=added) for s in SHAPES]
    prompt = [*PROMPT, VOCAB_SIZE + added - 1]
    for found in run_on_gang(size, logits_on_rank, directories, prompt, torch.float32, Numerics.EXACT):
        for shape, directory, by_id in zip(SHAPES, directories, found, strict=True):
            model = solo_model(directory, torch.float32, Numerics.EXACT)
            assert torch.equal(by_id, prompt_logits(model, prompt)), shape


def test_leaves_that_follow_the_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that all of this is to catch, once."""

    def wide_summands(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
        return exact_linear.wide_summands(x_TI, weight_OI, 8 if len(x_TI) < 4 else leaves)

    def linear(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
        return exact_linear.linear(x_TI, weight_OI, 8 if len(x_TI) < 4 else leaves)

    faulty = replace(table.EXACT_REFERENCE, wide_summands=wide_summands, linear=linear)
    monkeypatch.setattr(table, "EXACT_REFERENCE", faulty)
    model = load_model(tiny_checkpoint("31B"), SoloCommunicator(), torch.float32, Numerics.EXACT)
    whole = prompt_logits(model, PROMPT)
    assert any(not torch.equal(prompt_logits(model, PROMPT, chunks), whole) for chunks in CHUNKS)
