"""Quantized checkpoints in exact numerics: the bits of plain weights of the same numbers, on 1, 2 and 4 ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from gemray_kernels import table
from gemray_kernels.numerics import Numerics
from gemray_kernels.packed_product import PackedProduct
from gemray_kernels.packed_weight import PackedWeight
from gemray_kernels.reference.packed_linear import ReferenceProduct
from gemray_workers.embedded import embedded_path
from gemray_workers.parallel.communicator import SoloCommunicator
from support.checkpoints.quantized import FormatName, every_format_in_turn, quantized_checkpoint
from support.checkpoints.tiny import VOCAB_SIZE, WINDOW, Shape, tiny_checkpoint
from support.oracles.gang_logits import quantized_logits_on_rank
from support.oracles.oracle import loaded_model, prompt_logits
from support.processes.gang import RunOnGang
from support.waiting import HANG_S

Library = Literal["compressed-tensors", "modelopt"]
Layout = Literal["each", "stacked"]
PROMPT = [int(i) for i in torch.randint(VOCAB_SIZE, (2 * WINDOW + 3,), generator=torch.Generator().manual_seed(3))]
CHUNKS = ([1] * len(PROMPT), [2, 11, 1, len(PROMPT) - 14], [len(PROMPT) - 1, 1])
FORMATS: tuple[FormatName, ...] = tuple(name for name in get_args(FormatName) if name != "int4-g128")
"""The tiny models' rows are shorter than a group of 128."""
SHAPES: tuple[Shape, ...] = ("31B", "26B-A4B")
EVERY = [(shape, library) for shape in ("26B-A4B", "E2B") for library in get_args(Library)]


@functools.cache
def quantized(shape: Shape, name: FormatName, layout: Layout = "each") -> tuple[Path, Path]:
    return quantized_checkpoint(tiny_checkpoint(shape), lambda _layer: name, layout=layout)


@functools.cache
def groups_of_128() -> tuple[Path, Path]:
    return quantized_checkpoint(embedded_path("gemray-tiny"), lambda _layer: "int4-g128")


def logits(
    directory: Path, chunks: list[int] | None = None, *, dtype: torch.dtype = torch.float32, prompt: list[int] = PROMPT
) -> Tensor:
    model = loaded_model(directory, SoloCommunicator(), dtype, Numerics.EXACT)
    return prompt_logits(model, prompt, chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_weight_has_the_bits_of_a_plain_one(shape: Shape, name: FormatName, dtype: torch.dtype) -> None:
    packed, plain = quantized(shape, name)
    assert torch.equal(logits(packed, dtype=dtype), logits(plain, dtype=dtype))


def test_groups_of_128() -> None:
    packed, plain = groups_of_128()
    assert torch.equal(logits(packed), logits(plain))


def test_experts_in_one_tensor_are_the_same_model() -> None:
    each, stacked = (quantized("26B-A4B", "int4-g32", layout)[0] for layout in get_args(Layout))
    assert torch.equal(logits(each), logits(stacked))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "library"), EVERY)
def test_a_row_has_the_same_bits_in_every_chunk(shape: Shape, library: Library, dtype: torch.dtype) -> None:
    """Mixed recipes have layers of several formats side by side."""
    packed, _ = every_format_in_turn(tiny_checkpoint(shape), library)
    whole = logits(packed, dtype=dtype)
    for chunks in CHUNKS:
        assert torch.equal(logits(packed, chunks, dtype=dtype), whole), chunks


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_have_the_bits_of_one(run_on_gang: RunOnGang, size: int) -> None:
    """On 4 ranks, parts of the MLP (24 inputs), of experts (8) and of heads (16) cut groups of 32 and of 16; in the
    embedded model parts of 256 inputs cut groups of 128."""
    directories = [every_format_in_turn(tiny_checkpoint(shape), library)[0] for shape, library in EVERY]
    directories += [quantized("26B-A4B", name)[0] for name in ("int4-g32", "nvfp4", "fp8-block")]
    directories += [quantized("26B-A4B", "int4-g32", "stacked")[0], groups_of_128()[0]]
    ranks = run_on_gang(
        size, quantized_logits_on_rank, directories, PROMPT, torch.float32, Numerics.EXACT, timeout_s=HANG_S
    )
    for directory, found in zip(directories, ranks[0], strict=True):
        assert torch.equal(found, logits(directory)), directory


def test_products_of_fast_numerics_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that all of this is to catch, once: numbers that are right, multiplied by a library."""

    def packed_product(weight: PackedWeight, leaves: int) -> PackedProduct:
        return ReferenceProduct(weight)

    monkeypatch.setattr(table, "EXACT_REFERENCE", replace(table.EXACT_REFERENCE, packed_product=packed_product))
    packed, plain = quantized("31B", "int4-g32")
    whole = logits(packed)
    assert any(not torch.equal(logits(packed, chunks), whole) for chunks in CHUNKS)
    assert not torch.equal(whole, logits(plain))
