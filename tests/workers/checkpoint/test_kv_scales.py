"""Scales of an 8-bit KV cache: found by either library's names, and refused where they are not what can be served."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gemray_workers.checkpoint.quantized.kv_cache import kv_cache_format, read_kv_scales
from gemray_workers.errors import CheckpointError, InvalidField
from gemray_workers.model.config import ModelConfig
from support.checkpoints.kv_scales import Library, kv_scale_tensors, with_kv_scales
from support.checkpoints.tiny import tiny_checkpoint

PREFIX = "model.language_model."
FIRST = f"{PREFIX}layers.0.self_attn.k_scale"


def owners(model: ModelConfig) -> list[int]:
    return [layer for kind in model.kv_owners.values() for layer in kind]


@pytest.mark.parametrize("library", ["compressed-tensors", "modelopt"])
def test_every_layer_has_its_own(library: Library) -> None:
    directory = with_kv_scales(tiny_checkpoint("E2B"), library)
    model = ModelConfig.from_directory(directory)
    assert model.quantization is not None
    assert model.quantization.kv_cache == "fp8_e4m3"
    assert model.quantization.titles == (), "no layer's weights are quantized"
    layers = owners(model)
    assert len(layers) < model.num_layers, "some layers read another one's"
    found = read_kv_scales(directory, prefix=PREFIX, layers=layers, kv_cache="fp8_e4m3")
    stored = [value.item() for value in kv_scale_tensors(tiny_checkpoint("E2B"), library).values()]
    assert [scale for layer in layers for scale in found[layer]] == stored
    assert len(set(stored)) == len(stored)


def test_a_checkpoint_without_scales_has_none() -> None:
    found = read_kv_scales(tiny_checkpoint("31B"), prefix=PREFIX, layers=[0, 1], kv_cache=None)
    assert found == {}


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        ({}, None),
        ({"kv_cache_scheme": None}, None),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "fp8_e4m3"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8_e4m3"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "tensor"}}, "8-bit int a tensor"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}}, "8-bit float a attn_head"),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}, "NVFP4"),
    ],
)
def test_the_config_says_what_they_are_for(config: dict[str, Any], meant: str | None) -> None:
    assert kv_cache_format(config) == meant


def with_tensors(tmp_path: Path, changes: dict[str, Tensor | None]) -> Path:
    """A checkpoint with scales, of which some are others, or left out."""
    source = with_kv_scales(tiny_checkpoint("31B"))
    tensors: dict[str, Tensor | None] = {**load_file(source / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (torch.tensor([0.0]), "k_scale is damaged: 0.0; a scale is finite and greater than 0"),
        (torch.tensor([-1.0]), "k_scale is damaged: -1.0"),
        (torch.tensor([math.nan]), "k_scale is damaged: nan"),
        (torch.tensor([math.inf]), "k_scale is damaged: inf"),
        (torch.ones(2, 1, 1), r"k_scale is stored as F32 \[2, 1, 1\]; one number a layer"),
        (torch.ones(1, dtype=torch.int8), r"k_scale is stored as I8 \[1\]"),
        (None, f"for some layers alone; missing tensors: {FIRST}$"),
    ],
)
def test_a_damaged_one_is_named(tmp_path: Path, scale: Tensor | None, said: str) -> None:
    directory = with_tensors(tmp_path, {FIRST: scale})
    with pytest.raises(CheckpointError, match=said):
        read_kv_scales(directory, prefix=PREFIX, layers=[0, 1], kv_cache="fp8_e4m3")


def test_scales_of_another_format_are_refused() -> None:
    directory = with_kv_scales(tiny_checkpoint("31B"))
    with pytest.raises(InvalidField, match="auto: the checkpoint's k_scale and v_scale are of NVFP4 KV"):
        read_kv_scales(directory, prefix=PREFIX, layers=[0], kv_cache="NVFP4")


def test_a_config_needs_groups_or_a_cache(tmp_path: Path) -> None:
    source = with_kv_scales(tiny_checkpoint("31B"))
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]["kv_cache_scheme"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidField, match="config_groups"):
        ModelConfig.from_directory(tmp_path)
