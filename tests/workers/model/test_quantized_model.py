"""Quantized checkpoints in the model: logits of transformers with the decompressed weights, on 1, 2 and 4 ranks."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gemray_workers.checkpoint.loader import check_weights
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import CheckpointError, InvalidField
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import SoloCommunicator
from support.checkpoints.quantized import FormatName, every_format_in_turn, quantized_checkpoint
from support.checkpoints.tiny import VOCAB_SIZE, WINDOW, Shape, tiny_checkpoint
from support.oracles.gang_logits import quantized_logits_on_rank
from support.oracles.oracle import loaded_model, prompt_logits
from support.processes.gang import RunOnGang
from support.waiting import HANG_S

Library = Literal["compressed-tensors", "modelopt"]
TOLERANCE = 2e-5
PROMPT = [int(i) for i in torch.randint(VOCAB_SIZE, (2 * WINDOW + 3,), generator=torch.Generator().manual_seed(3))]
FORMATS: tuple[FormatName, ...] = tuple(name for name in get_args(FormatName) if name != "int4-g128")
"""The tiny models' rows are shorter than a group of 128."""
SHAPES: tuple[Shape, ...] = ("31B", "26B-A4B")
UP = "model.language_model.layers.0.mlp.up_proj"


@functools.cache
def quantized(shape: Shape, name: FormatName, layout: Literal["each", "stacked"] = "each") -> tuple[Path, Path]:
    return quantized_checkpoint(tiny_checkpoint(shape), lambda _layer: name, layout=layout)


@torch.no_grad()
def hf_logits(directory: Path) -> Tensor:
    import transformers

    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(directory, attn_implementation="eager").eval()
    logits: Tensor = model(input_ids=torch.tensor([PROMPT])).logits[0]
    return logits


def logits_of(directory: Path) -> Tensor:
    return prompt_logits(solo(directory), PROMPT)


def solo(directory: Path, dtype: torch.dtype = torch.float32) -> TargetModel:
    return loaded_model(directory, SoloCommunicator(), dtype)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers_with_decompressed_weights(shape: Shape, name: FormatName) -> None:
    packed, plain = quantized(shape, name)
    expected = hf_logits(plain)
    logits = prompt_logits(solo(packed), PROMPT)
    assert (logits - expected).abs().max() <= TOLERANCE
    original = prompt_logits(solo(tiny_checkpoint(shape)), PROMPT)
    assert (original - expected).abs().max() > 1000 * TOLERANCE, "quantizing changed nothing"


def test_groups_of_128(run_on_gang: RunOnGang) -> None:
    """In the embedded model, whose rows have 256 and 512 inputs; on 4 ranks parts of the 256 end inside a group."""
    packed, plain = quantized_checkpoint(embedded_path("gemray-tiny"), lambda _layer: "int4-g128")
    assert (prompt_logits(solo(packed), PROMPT) - hf_logits(plain)).abs().max() <= TOLERANCE
    expected = prompt_logits(solo(packed, torch.float64), PROMPT)
    (logits,) = run_on_gang(4, quantized_logits_on_rank, [packed], PROMPT, timeout_s=HANG_S)[0]
    assert (logits - expected).abs().max() <= 1e-11


@pytest.mark.parametrize("library", get_args(Library))
@pytest.mark.parametrize("shape", ["26B-A4B", "E2B"])
def test_a_mixed_recipe(shape: Shape, library: Library) -> None:
    packed, plain = every_format_in_turn(tiny_checkpoint(shape), library)
    assert (prompt_logits(solo(packed), PROMPT) - hf_logits(plain)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["int4-g32", "fp8-channel", "int8-plain"])
def test_experts_in_one_tensor_are_the_same_model(name: FormatName) -> None:
    each, stacked = (solo(quantized("26B-A4B", name, layout)[0]) for layout in ("each", "stacked"))
    assert torch.equal(prompt_logits(each, PROMPT), prompt_logits(stacked, PROMPT))


@pytest.mark.parametrize("layout", ["each", "plain"])
def test_experts_that_a_recipe_leaves_plain(tmp_path: Path, layout: str) -> None:
    packed, plain = quantized_checkpoint(
        tiny_checkpoint("26B-A4B"), lambda layer: None if ".experts." in layer else "fp8-channel"
    )
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*experts.*")
    (packed / "config.json").write_text(json.dumps(config))
    if layout == "plain":
        kept = {n: t for n, t in load_file(packed / "model.safetensors").items() if ".experts." not in n}
        experts = {n: t for n, t in load_file(plain / "model.safetensors").items() if ".experts." in n}
        save_file({**kept, **experts}, packed / "model.safetensors", {"format": "pt"})
    assert (prompt_logits(solo(packed), PROMPT) - hf_logits(plain)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_same_logits_and_ids(run_on_gang: RunOnGang, size: int) -> None:
    """On 4 ranks, parts of the MLP (24 inputs), of experts (8) and of heads (16) cut groups of 32 and of 16."""
    directories = [
        every_format_in_turn(tiny_checkpoint(shape), library)[0] for shape in SHAPES for library in get_args(Library)
    ]
    directories.append(quantized("26B-A4B", "int4-g32", "stacked")[0])
    directories.append(every_format_in_turn(tiny_checkpoint("E2B"), "compressed-tensors")[0])
    ranks = run_on_gang(size, quantized_logits_on_rank, directories, PROMPT, timeout_s=HANG_S)
    for directory, logits in zip(directories, ranks[0], strict=True):
        expected = prompt_logits(solo(directory, torch.float64), PROMPT)
        assert (logits - expected).abs().max() <= 1e-11, directory
        assert torch.equal(logits.argmax(-1), expected.argmax(-1)), directory


def test_weights_stay_packed_in_memory() -> None:
    sizes = {name: solo(quantized("31B", name)[0], torch.bfloat16).weight_bytes for name in FORMATS}
    plain = solo(tiny_checkpoint("31B"), torch.bfloat16).weight_bytes
    tables = 2 * 64 * 320
    assert all((size - tables) / (plain - tables) < 0.6 for size in sizes.values()), sizes
    assert (sizes["nvfp4"] - tables) / (plain - tables) < 0.4


def edited(directory: Path, destination: Path, change: Any) -> Path:
    shutil.copytree(directory, destination)
    tensors = load_file(destination / "model.safetensors")
    change(tensors)
    save_file(tensors, destination / "model.safetensors", {"format": "pt"})
    return destination


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        solo(directory)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("int4-g32", float("nan")), ("fp8-channel", float("inf")), ("int8-plain", -1.0), ("fp8-channel", 3e38)],
)
def test_a_damaged_scale_is_named(tmp_path: Path, name: FormatName, value: float) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight_scale"][3] = value

    told = refusal(edited(quantized("31B", name)[0], tmp_path / "damaged", damage))
    assert f"{UP}.weight_scale is damaged" in told


@pytest.mark.parametrize("value", [float("nan"), 0.0, 1e-42])
def test_a_damaged_second_scale_is_named(tmp_path: Path, value: float) -> None:
    """A number divided by the smallest ones is none in float32."""

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight_global_scale"].fill_(value)

    told = refusal(edited(quantized("31B", "nvfp4")[0], tmp_path / "damaged", damage))
    assert f"{UP}.weight_global_scale is damaged" in told


def test_codes_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight"].view(torch.uint8)[5, 3] = 0xFF

    told = refusal(edited(quantized("31B", "fp8-channel")[0], tmp_path / "damaged", damage))
    assert told == f"{UP}.weight is damaged: 1 of 6144 codes that were read are NaN"


def test_scales_in_another_order_are_named(tmp_path: Path) -> None:
    """As many numbers, those of each input where those of each output belong."""

    def transpose(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"].T.contiguous()

    told = refusal(edited(quantized("31B", "nvfp4")[0], tmp_path / "x", transpose))
    assert f"{UP}.weight_scale has shape [4, 96], the model needs [96, 4] of nvfp4" in told


def test_a_scale_that_is_no_float_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"].to(torch.int8)

    told = refusal(edited(quantized("31B", "int4-g32")[0], tmp_path / "x", change))
    assert f"{UP}.weight_scale is stored as I8; allowed: F64, F32, F16, BF16, F8_E4M3" in told


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    directory = edited(quantized("31B", "nvfp4")[0], tmp_path / "x", lambda t: t.pop(f"{UP}.weight_global_scale"))
    assert f"missing tensors: {UP}.weight_global_scale" in refusal(directory)


def test_a_wrong_group_size_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "x"
    shutil.copytree(quantized("31B", "int4-g32")[0], directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    (directory / "config.json").write_text(json.dumps(config))
    told = refusal(directory)
    assert f"{UP}.weight_scale has shape [96, 2], the model needs [96, 4] of int4 group 16" in told


def test_a_plain_weight_in_the_place_of_a_packed_one_is_named(tmp_path: Path) -> None:
    def replace_codes(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].to(torch.bfloat16)

    told = refusal(edited(quantized("31B", "fp8-channel")[0], tmp_path / "x", replace_codes))
    assert f"{UP}.weight is stored as BF16; allowed: F8_E4M3" in told


def test_codes_in_the_place_of_a_plain_weight_are_named(tmp_path: Path) -> None:
    directory = tmp_path / "x"
    shutil.copytree(quantized("31B", "fp8-channel")[0], directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["ignore"].append(UP)
    (directory / "config.json").write_text(json.dumps(config))
    told = refusal(directory)
    assert f"{UP}.weight is stored as F8_E4M3" in told
    assert f"unexpected tensors: {UP}.weight_scale" in told


def test_a_quantized_table_is_refused(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight_packed"] = torch.zeros(VOCAB_SIZE, 8, dtype=torch.int32)
        tensors["lm_head.weight_scale"] = torch.ones(VOCAB_SIZE, 2)

    directory = edited(quantized("31B", "int4-g32")[0], tmp_path / "x", add)
    with pytest.raises(InvalidField, match=r"lm_head\.weight_scale"):
        ModelConfig.from_directory(directory)


def test_a_stored_head_beside_a_tied_embedding_is_read_as_ever(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()

    packed, plain = quantized("31B", "int4-g32")
    directory = edited(packed, tmp_path / "x", add)
    assert torch.equal(prompt_logits(solo(directory), PROMPT), prompt_logits(solo(plain), PROMPT))


def test_scales_that_change_nothing_are_left_unread(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.language_model.layers.0.self_attn.k_scale"] = torch.ones(1)
        tensors["model.language_model.layers.0.self_attn.v_proj.v_scale"] = torch.ones(1)
        tensors[f"{UP}.input_global_scale"] = torch.ones(1)
        tensors[f"{UP}.input_zero_point"] = torch.ones(1)
        tensors["model.language_model.layers.0.self_attn.k_zero_point"] = torch.zeros(1)

    directory = edited(quantized("31B", "nvfp4")[0], tmp_path / "x", add)
    assert torch.equal(
        prompt_logits(solo(directory), PROMPT), prompt_logits(solo(quantized("31B", "nvfp4")[1]), PROMPT)
    )


def test_scales_keep_their_numbers_in_any_dtype(tmp_path: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: t.double() for name, t in tensors.items() if name.endswith("weight_scale")})

    packed, _ = quantized("31B", "int4-g32")
    assert torch.equal(prompt_logits(solo(edited(packed, tmp_path / "x", widen)), PROMPT), logits_of(packed))


def test_experts_keep_their_scales_where_the_first_ones_are_narrower(tmp_path: Path) -> None:
    def first_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: t.bfloat16() for n, t in tensors.items() if ".experts.0." in n and n.endswith("weight_scale")}

    packed, _ = quantized("26B-A4B", "int4-g32")
    narrow = edited(packed, tmp_path / "x", lambda tensors: tensors.update(first_experts(tensors)))
    rounded = edited(narrow, tmp_path / "y", lambda t: t.update({n: s.float() for n, s in first_experts(t).items()}))
    assert torch.equal(logits_of(narrow), logits_of(rounded))


@pytest.mark.parametrize("layout", ["each", "stacked"])
def test_experts_below_a_module_of_their_own(tmp_path: Path, layout: Literal["each", "stacked"]) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name.replace(".experts.", ".moe.experts.")] = tensors.pop(name)

    packed, _ = quantized("26B-A4B", "int4-g32", layout)
    assert torch.equal(logits_of(edited(packed, tmp_path / "x", rename)), logits_of(packed))


def test_a_recipe_may_name_experts_as_the_model_does(tmp_path: Path) -> None:
    """Those of one layer are plain, by the name that they had before an exporter moved them."""
    packed, plain = quantized_checkpoint(
        tiny_checkpoint("26B-A4B"), lambda layer: None if "layers.0.experts" in layer else "fp8-channel"
    )
    config = json.loads((packed / "config.json").read_text())
    assert any("layers.0.experts.0.up_proj" in name for name in config["quantization_config"]["ignore"])

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name.replace(".experts.", ".moe.experts.")] = tensors.pop(name)

    moved = edited(packed, tmp_path / "x", rename)
    assert (prompt_logits(solo(moved), PROMPT) - hf_logits(plain)).abs().max() <= TOLERANCE


def test_packed_layers_that_no_config_tells_of_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "x"
    shutil.copytree(quantized("31B", "int4-g32")[0], directory)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidField, match=r"how model\.language_model\.layers\.0\..* is to be read") as raised:
        ModelConfig.from_directory(directory)
    assert raised.value.field == f"quantization_config in {directory}/config.json"
    assert "modelopt NVFP4" in raised.value.allowed


def test_headers_are_checked_without_memory() -> None:
    directory, _ = quantized("26B-A4B", "nvfp4")
    config = ModelConfig.from_directory(directory)
    model = TargetModel(config, SoloCommunicator(), dtype=torch.bfloat16, device=torch.device("meta"))
    check_weights(directory, model.weight_targets(), prefix=config.weight_prefix, is_ignored=model.ignored_name)
