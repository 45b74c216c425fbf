"""The numbers of packed weights against the libraries that define the formats, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file
from torch import Tensor

from gemray_kernels.packed_weight import PackedWeight
from gemray_kernels.reference.packed_linear import dequantized, packed_linear, wide_packed_linear
from gemray_workers.checkpoint.quantized.compressed_tensors import read_compressed_tensors
from gemray_workers.checkpoint.quantized.formats import WeightFormat
from gemray_workers.checkpoint.quantized.modelopt import read_modelopt
from gemray_workers.checkpoint.quantized.recipe import Recipe
from gemray_workers.checkpoint.random_weights import random_weights
from gemray_workers.model.packed_linear import empty_packed, packed_linear_weight, packed_targets
from gemray_workers.model.weight_sharding import Part, WeightSharding
from support.checkpoints import modelopt_weights
from support.checkpoints.quantized import FormatName, LibraryFormat, Tensors, library_format, of_compressed_tensors

NUM_OUT, NUM_IN = 160, 256
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
SHARDING = WeightSharding(0, 1, torch.float32, torch.device("cpu"))


def weight_format(name: FormatName) -> WeightFormat:
    return format_read(library_format(name))


def format_read(form: LibraryFormat) -> WeightFormat:
    if form.method == "modelopt":
        ((_, found),), _ = read_modelopt(form.config)
    else:
        ((_, found),), _ = read_compressed_tensors({"config_groups": {"g": {"targets": ["Linear"], **form.config}}})
    return found


def packed(form: WeightFormat, found: Tensors, inputs: Part, outputs: Part | None = None) -> PackedWeight:
    """A part of a layer from its tensors on disk, by the copies that the layer asks for."""
    outputs = outputs or Part(0, NUM_OUT, NUM_OUT)
    dtypes = {f"l.{name}": tensor.dtype for name, tensor in found.items()}
    recipe = Recipe(method="", prefix="", targets=(), ignored=(), scale_dtypes=dtypes)
    weight = empty_packed(recipe, form, ["l"], outputs.length, inputs, SHARDING)
    for target in packed_targets("l", form, [(outputs, weight)], inputs):
        stored = found[target.name.removeprefix("l.")]
        for copy in target.copies:
            copy.destination.copy_(stored.view(target.shape)[copy.source])
    return weight


def whole(num_in: int) -> Part:
    return Part(0, num_in, num_in)


def random_weight() -> Tensor:
    return torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(1)) / 16


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_library(name: FormatName) -> None:
    found = library_format(name).compress(random_weight())
    expected = library_format(name).decompress(found)
    assert expected.dtype == torch.float32
    assert 0 < (expected - random_weight()).abs().mean() < 0.01
    weight = packed(weight_format(name), found, whole(NUM_IN))
    assert torch.equal(dequantized(weight, torch.float32), expected)


@pytest.mark.parametrize(
    ("format_name", "weights"),
    [
        *(
            ("pack-quantized", {"num_bits": bits, "strategy": "group", "group_size": size})
            for bits in (4, 8)
            for size in (16, 64, 256)
        ),
        ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
        ("int-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64}),
        ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        *(
            ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block})
            for block in ([64, 64], [1, 128], [48, 256])
        ),
    ],
)
def test_numbers_of_other_groups_and_blocks(format_name: str, weights: dict[str, Any]) -> None:
    form = of_compressed_tensors(format_name, None, **weights)
    found = form.compress(random_weight())
    weight = packed(format_read(form), found, whole(NUM_IN))
    assert torch.equal(dequantized(weight, torch.float32), form.decompress(found))


@pytest.mark.parametrize(
    ("algorithm", "name"), [("W4A16_NVFP4", "modelopt-nvfp4"), ("FP8_PER_CHANNEL_PER_TOKEN", "fp8-channel")]
)
def test_numbers_of_other_algorithms_of_modelopt(algorithm: str, name: FormatName) -> None:
    found = library_format(name).compress(random_weight())
    ((_, form),), _ = read_modelopt({"quant_algo": algorithm})
    weight = packed(form, found, whole(NUM_IN))
    assert torch.equal(dequantized(weight, torch.float32), library_format(name).decompress(found))


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.startswith("modelopt")])
def test_bfloat16_numbers_are_those_of_the_library_with_scales_as_they_are_published(name: FormatName) -> None:
    """Scales in bfloat16, and the library's own rounding to it."""
    form = library_format(name)
    found = form.compress(random_weight())
    if "weight_global_scale" not in found:
        found["weight_scale"] = found["weight_scale"].to(torch.bfloat16)
    args = QuantizationArgs(**form.config["weights"])
    compressor = BaseCompressor.get_value_from_registry(form.config["format"])
    expected = compressor.decompress(dict(found), QuantizationScheme(targets=["Linear"], weights=args))["weight"]
    assert expected.dtype == torch.bfloat16
    weight = packed(weight_format(name), found, whole(NUM_IN))
    assert torch.equal(dequantized(weight, torch.bfloat16), expected)


@pytest.mark.parametrize(
    ("algorithm", "dtype"), [("NVFP4", "float32"), ("NVFP4", "bfloat16"), ("FP8", "float32"), ("FP8_PB_WO", "float32")]
)
def test_numbers_are_those_of_modelopt(algorithm: str, dtype: str) -> None:
    stored = {
        name.removeprefix(f"{algorithm}."): tensor
        for name, tensor in load_file(modelopt_weights.FILE).items()
        if name.startswith(f"{algorithm}.")
    }
    ((_, form),), _ = read_modelopt({"quant_algo": algorithm})
    expected = stored[dtype]
    num_out, num_in = expected.shape
    weight = packed(form, stored, whole(num_in), Part(0, num_out, num_out))
    assert torch.equal(dequantized(weight, expected.dtype), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("start", "length"), [(0, 128), (128, 128), (64, 64), (20, 41), (1, 3)])
def test_a_part_of_the_inputs_has_the_numbers_of_its_place(name: FormatName, start: int, length: int) -> None:
    """Parts that begin and end inside words and groups, and parts of the outputs that cut blocks."""
    found = library_format(name).compress(random_weight())
    expected = library_format(name).decompress(found)
    outputs = Part(100, 50, NUM_OUT)
    weight = packed(weight_format(name), found, Part(start, length, NUM_IN), outputs)
    assert torch.equal(dequantized(weight, torch.float32), expected[100:150, start : start + length])


def test_products_are_those_of_the_dequantized_weight() -> None:
    found = library_format("nvfp4").compress(random_weight())
    weight = packed(weight_format("nvfp4"), found, whole(NUM_IN))
    x_TI = torch.randn(3, NUM_IN, generator=torch.Generator().manual_seed(2))
    weight_OI = library_format("nvfp4").decompress(found)
    assert torch.equal(packed_linear(x_TI, weight), x_TI @ weight_OI.T)
    narrow_TI = x_TI.to(torch.bfloat16)
    wide_TO = wide_packed_linear(narrow_TI, weight)
    assert wide_TO.dtype == torch.float32
    torch.testing.assert_close(wide_TO, narrow_TI.float() @ weight_OI.to(torch.bfloat16).float().T)
    assert torch.equal(packed_linear(x_TI, weight.rows(50)), x_TI @ weight_OI[50:].T)


def test_a_scale_more_or_less_shows() -> None:
    """What the comparisons above rest on: another direction of the second scale gives other numbers."""
    found = library_format("nvfp4").compress(random_weight())
    weight = packed(weight_format("nvfp4"), found, whole(NUM_IN))
    other = replace(weight, row_scale_divides=False)
    assert not torch.equal(dequantized(weight, torch.float32), dequantized(other, torch.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_have_the_spread_of_plain_ones(name: FormatName) -> None:
    form, outputs = weight_format(name), Part(0, NUM_OUT, NUM_OUT)
    recipe = Recipe(method="", prefix="", targets=(), ignored=(), scale_dtypes={})
    weight = empty_packed(recipe, form, ["l"], NUM_OUT, whole(NUM_IN), SHARDING)
    targets = packed_targets("l", form, [(outputs, weight)], whole(NUM_IN))
    random_weights("", targets, prefix="", is_ignored=lambda _name: False)
    numbers = dequantized(weight, torch.float32)
    assert numbers.isfinite().all()
    assert abs(numbers.std().item() * NUM_IN**0.5 - 1) < 0.1
    assert sum(t.weights_each * c.destination.numel() for t in targets for c in t.copies) == numbers.numel()


def test_a_weight_multiplies_once_it_is_filled() -> None:
    recipe = Recipe(method="", prefix="", targets=(), ignored=(), scale_dtypes={})
    outputs = [("q", Part(0, NUM_OUT, NUM_OUT)), ("k", Part(0, NUM_OUT, NUM_OUT))]
    weight = packed_linear_weight(recipe, weight_format("nvfp4"), outputs, whole(NUM_IN), SHARDING)
    x_TI = torch.ones(1, NUM_IN, dtype=SHARDING.dtype)
    with pytest.raises(RuntimeError, match="once they are filled"):
        weight.product(x_TI)
    random_weights("", weight.weight_targets(), prefix="", is_ignored=lambda _name: False)
    assert weight.product(x_TI).shape == (1, 2 * NUM_OUT)
    assert len({target.then for target in weight.weight_targets()}) == 1, "it would be laid out twice"
