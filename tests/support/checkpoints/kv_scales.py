"""Checkpoints with scales of an 8-bit KV cache, by the names of the two libraries."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gemray_workers.model.config import ModelConfig

Library = Literal["compressed-tensors", "modelopt"]
_NAMES: dict[Library, str] = {
    "compressed-tensors": "self_attn.{}_scale",
    "modelopt": "self_attn.{}_proj.{}_scale",
}
_CONFIGS: dict[Library, dict[str, object]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "symmetric": True,
            "dynamic": False,
        },
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
}


def kv_scale_tensors(source: Path, library: Library) -> dict[str, Tensor]:
    """By full name: a scale for the keys and one for the values of each layer that owns KV. Their products with 448
    lie around what tiny models' numbers reach, so that a few saturate."""
    model = ModelConfig.from_directory(source)
    generator = torch.Generator().manual_seed(5)
    return {
        f"{model.weight_prefix}layers.{layer}.{_NAMES[library].format(part, part)}": (
            torch.rand((1,) if library == "compressed-tensors" else (), generator=generator) * 0.008 + 0.004
        )
        for owners in model.kv_owners.values()
        for layer in owners
        for part in ("k", "v")
    }


@functools.cache
def with_kv_scales(source: Path, library: Library = "compressed-tensors") -> Path:
    """A copy of a plain checkpoint of one file, with scales and the config that goes with them. Do not change it."""
    directory = Path(tempfile.mkdtemp(prefix="kv-scales-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    shutil.copytree(source, directory, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors") | kv_scale_tensors(source, library)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": _CONFIGS[library]}))
    return directory
