"""Checkpoints with a head on disk beside the embedding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = "model.safetensors"


def with_head(
    source: Path, destination: Path, head_VH: Tensor | None, *, tied: bool = True, text_tied: bool | None = None
) -> Path:
    """A copy of a checkpoint with other settings of tie_word_embeddings and, unless None, an ``lm_head.weight``."""
    shutil.copytree(source, destination)
    config = json.loads((destination / "config.json").read_text())
    config["tie_word_embeddings"] = tied
    if text_tied is not None:
        config["text_config"]["tie_word_embeddings"] = text_tied
    (destination / "config.json").write_text(json.dumps(config))
    if head_VH is not None:
        tensors = load_file(destination / FILE)
        save_file({**tensors, "lm_head.weight": head_VH}, destination / FILE, metadata={"format": "pt"})
    return destination


def with_head_alone(source: Path, destination: Path) -> Path:
    """A copy of a tied checkpoint whose one table lies on disk as the head."""
    directory = with_head(source, destination, None)
    tensors = load_file(directory / FILE)
    name = next(name for name in tensors if name.endswith(".embed_tokens.weight"))
    tensors["lm_head.weight"] = tensors.pop(name)
    save_file(tensors, directory / FILE, metadata={"format": "pt"})
    return directory


def embedding_of(directory: Path) -> Tensor:
    """The embedding on disk."""
    tensors = load_file(directory / FILE)
    return next(tensor for name, tensor in tensors.items() if name.endswith(".embed_tokens.weight"))


def other_head(directory: Path, seed: int = 5) -> Tensor:
    """A head of the embedding's shape and spread."""
    table_VH = embedding_of(directory)
    return torch.randn(table_VH.shape, generator=torch.Generator().manual_seed(seed)) * table_VH.std()
