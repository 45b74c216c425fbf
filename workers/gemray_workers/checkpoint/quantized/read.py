"""From a checkpoint's directory to its recipe, decided before any weight is read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gemray_workers.checkpoint.index import CheckpointIndex, read_index
from gemray_workers.checkpoint.json_file import read_json_object
from gemray_workers.checkpoint.quantized.compressed_tensors import Groups, read_compressed_tensors
from gemray_workers.checkpoint.quantized.formats import ACCEPTED
from gemray_workers.checkpoint.quantized.kv_cache import kv_cache_format
from gemray_workers.checkpoint.quantized.modelopt import read_modelopt
from gemray_workers.checkpoint.quantized.recipe import ExpertLayout, Recipe
from gemray_workers.errors import CheckpointError, InvalidField, Summary

MODELOPT_FILE = "hf_quant_config.json"

_READERS: Mapping[str, Callable[[Mapping[str, Any]], Groups]] = {
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
}
_SCALE_DTYPES = {
    "F64": torch.float32,  # in which numbers are computed
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
_SCALE = re.compile(r"(weight_scale|weight_scale_2|weight_global_scale)$")
_TABLE_SCALE = re.compile(r"(^|\.)(lm_head|embed_tokens|embed_tokens_per_layer)\.weight_scale$")
_PACKED = re.compile(r"layers\.\d+\..*\.(weight_packed|weight_scale|weight_scale_inv|qweight|scales|absmax)$")
"""Names that tell of quantized layers, whichever library has made them."""
_EXPERT_LAYOUTS: tuple[tuple[ExpertLayout, re.Pattern[str]], ...] = (
    ("each", re.compile(r"\.experts\.\d+\.")),
    ("stacked", re.compile(r"\.experts\.(gate_up|down)_proj\.")),
    ("plain", re.compile(r"\.experts\.(gate_up|down)_proj$")),
)


def read_recipe(path: str | os.PathLike[str], *, prefix: str) -> Recipe | None:
    """What the configs of a directory say of quantized layers; None where they say nothing.

    Args:
        path: a local Hugging Face directory, with or without weights.
        prefix: what stands before the model's own names on disk.

    Raises:
        CheckpointError: a config that cannot be read.
        InvalidField: another format than those that gemray computes, named with what is accepted.
    """
    directory = Path(path)
    file, content = _quantization_config(directory)
    if content is None:
        _refuse_packed_layers(directory, file, prefix)
        return None
    try:
        return _recipe(directory, content, prefix)
    except InvalidField as error:  # model or drafter: the directory tells which one
        raise InvalidField(f"{error.field} in {file}", error.value, error.allowed) from error


def _recipe(directory: Path, content: Mapping[str, Any], prefix: str) -> Recipe:
    method = content.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        found = f"{method} ({content['quant_type']})" if content.get("quant_type") else method
        raise InvalidField("quantization_config quant_method", found, f"one of {', '.join(_READERS)}: {ACCEPTED}")
    targets, ignored = _READERS[method](content)
    index = _index(directory)
    if index is not None:
        _refuse_quantized_tables(index)
    return Recipe(
        method=method,
        prefix=prefix,
        targets=targets,
        ignored=ignored,
        scale_dtypes={} if index is None else _scale_dtypes(index),
        experts="each" if index is None else _expert_layout(index),
        experts_name="experts" if index is None else _experts_name(index),
        kv_cache=kv_cache_format(content),
    )


def _quantization_config(directory: Path) -> tuple[Path, Mapping[str, Any] | None]:
    """What is said of quantized weights, and the file that says it."""
    file = directory / "config.json"
    config = read_json_object(file)
    text = config.get("text_config")
    for owner in (config, text if isinstance(text, dict) else {}):
        found = owner.get("quantization_config")
        if found is None:
            continue
        if not isinstance(found, dict):
            raise InvalidField(f"quantization_config in {file}", Summary(type(found).__name__), "an object")
        nested = found.get("quantization")
        by_modelopt = "quant_algo" in found or (isinstance(nested, dict) and "quant_algo" in nested)
        return file, {"quant_method": "modelopt", **found} if by_modelopt else found
    if not (directory / MODELOPT_FILE).is_file():
        return file, None
    file = directory / MODELOPT_FILE
    return file, {**read_json_object(file), "quant_method": "modelopt"}


def _index(directory: Path) -> CheckpointIndex | None:
    """The tensors on disk; one that is absent or unsound is left to the loader to report."""
    try:
        return read_index(directory)
    except CheckpointError:
        return None


def _refuse_packed_layers(directory: Path, file: Path, prefix: str) -> None:
    """Refuse packed layers that no config tells of: a list of tensors that do not fit would not say why."""
    index = _index(directory)
    if index is None:
        return
    if found := next((name for name in index.tensors if name.startswith(prefix) and _PACKED.search(name)), None):
        allowed = f"what tells how {found} is to be read, here or in {MODELOPT_FILE}. Accepted are {ACCEPTED}"
        raise InvalidField(f"quantization_config in {file}", None, allowed)


def _refuse_quantized_tables(index: CheckpointIndex) -> None:
    if found := next((name for name in index.tensors if _TABLE_SCALE.search(name)), None):
        raise InvalidField("quantization_config", Summary(f"a quantized table ({found})"), "plain embeddings and heads")


def _scale_dtypes(index: CheckpointIndex) -> dict[str, torch.dtype]:
    return {
        name: _SCALE_DTYPES[stored.dtype]
        for name, stored in index.tensors.items()
        if _SCALE.search(name) and stored.dtype in _SCALE_DTYPES
    }


def _expert_layout(index: CheckpointIndex) -> ExpertLayout:
    for layout, pattern in _EXPERT_LAYOUTS:
        if any(pattern.search(name) for name in index.tensors):
            return layout
    return "each"


def _experts_name(index: CheckpointIndex) -> str:
    return "moe.experts" if any(".moe.experts." in name for name in index.tensors) else "experts"
