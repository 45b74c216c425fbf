"""Write the three models as Hugging Face directories in bf16, and read them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .settings import FAMILY, assistant_config, dflash_config, generation_config, target_config
from .target import Target


def _bf16(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (t.bfloat16() if t.is_floating_point() else t).detach().cpu().contiguous() for name, t in tensors.items()
    }


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_bf16(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def save_target(target: Target, folder: Path) -> None:
    """gemray-tiny, prefix `model.`, no lm_head (tied)."""
    _write(folder, target.state_dict(), target_config())
    (folder / "generation_config.json").write_text(json.dumps(generation_config(), indent=1) + "\n")


def save_assistant(module: nn.Module, folder: Path, ordered: bool) -> None:
    """The MTP assistant, with the centroid head if `ordered`."""
    _write(folder, module.state_dict(), assistant_config(ordered))
    config = generation_config() | {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    (folder / "generation_config.json").write_text(json.dumps(config, indent=1) + "\n")


def save_dflash(module: nn.Module, folder: Path) -> None:
    """The block drafter, no prefix, no embeddings."""
    _write(folder, module.state_dict(), dflash_config())


def load_module(module: nn.Module, folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Fill `module` from a saved folder, every tensor used, and freeze it."""
    tensors = load_file(folder / "model.safetensors")
    module.load_state_dict(tensors, strict=True)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    # Buffers such as RoPE frequencies stay in fp32.
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module.to(device).eval()


def load_target(folder: Path, dtype: torch.dtype, device: torch.device) -> Target:
    """gemray-tiny, frozen."""
    target = Target(FAMILY.target)
    load_module(target, folder, dtype, device)
    return target
