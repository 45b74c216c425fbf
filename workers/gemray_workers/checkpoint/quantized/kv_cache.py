"""What a checkpoint says of an 8-bit KV cache: which format its config means, and the scales of each layer.

Sources: ``kv_cache_scheme`` of compressed-tensors 0.20.1, ``kv_cache_quant_algo`` of nvidia-modelopt 0.47.0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch

from gemray_workers.checkpoint.index import CheckpointIndex, StoredTensor, listed, opened, read_index
from gemray_workers.errors import CheckpointError, InvalidField

FP8_E4M3 = "fp8_e4m3"

Scales = Mapping[int, tuple[float, float]]
"""By layer: what multiplies its keys and its values."""

_PLACES = ("self_attn.{}_scale", "self_attn.{}_proj.{}_scale", "self_attn.attn.{}_scale")
"""Where compressed-tensors, modelopt and vLLM's own exporters put a scale, below a layer's name."""
_DTYPES = ("F64", "F32", "F16", "BF16")


def kv_cache_format(content: Mapping[str, Any]) -> str | None:
    """The format that a ``quantization_config`` means for keys and values: `FP8_E4M3`, another one in words, or None
    where it says nothing."""
    nested = content.get("quantization")
    own: Mapping[str, Any] = nested if isinstance(nested, Mapping) else content
    algorithm = own.get("kv_cache_quant_algo")
    if algorithm is not None:
        return FP8_E4M3 if algorithm == "FP8" else str(algorithm)
    scheme = content.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return None
    kind = f"{scheme.get('num_bits')}-bit {scheme.get('type', 'int')} a {scheme.get('strategy') or 'tensor'}"
    return FP8_E4M3 if kind == "8-bit float a tensor" and scheme.get("symmetric") is not False else kind


def read_kv_scales(
    directory: str | os.PathLike[str], *, prefix: str, layers: Iterable[int], kv_cache: str | None
) -> Scales:
    """The scales of the layers that own KV; empty where none is on disk.

    Args:
        directory: a local Hugging Face directory with weights.
        prefix: what stands before the model's own names on disk.
        layers: those that own KV.
        kv_cache: what `kv_cache_format` says.

    Raises:
        InvalidField: the checkpoint's scales are of another format than e4m3.
        CheckpointError: an unsound checkpoint; scales that are there for some layers and not for others, of another
            shape or dtype, or that are not finite and greater than 0.
    """
    index = read_index(directory)
    wanted = {(layer, part): _stored(index, prefix, layer, part) for layer in layers for part in ("k", "v")}
    found = {place: stored for place, stored in wanted.items() if stored is not None}
    if not found:
        return {}
    if kv_cache not in (None, FP8_E4M3):
        raise InvalidField("kv_dtype", FP8_E4M3, f"auto: the checkpoint's k_scale and v_scale are of {kv_cache} KV")
    if missing := {f"{prefix}layers.{layer}.self_attn.{part}_scale" for layer, part in wanted.keys() - found.keys()}:
        raise CheckpointError(
            f"{index.directory} has scales of keys and values for some layers alone; missing tensors: {listed(missing)}"
        )
    values = {place: _value(stored) for place, stored in found.items()}
    return {layer: (values[layer, "k"], values[layer, "v"]) for layer, part in values if part == "k"}


def _stored(index: CheckpointIndex, prefix: str, layer: int, part: str) -> StoredTensor | None:
    names: Iterator[str] = (f"{prefix}layers.{layer}.{place.format(part, part)}" for place in _PLACES)
    return next((index.tensors[name] for name in names if name in index.tensors), None)


def _value(stored: StoredTensor) -> float:
    if prod(stored.shape) != 1 or stored.dtype not in _DTYPES:
        raise CheckpointError(
            f"{stored.name} is stored as {stored.dtype} {list(stored.shape)}; one number a layer, as "
            f"{' or '.join(_DTYPES)}, can be served"
        )
    with opened(stored.file) as tensors:
        value = float(tensors.get_tensor(stored.name))
    if not torch.finfo(torch.float32).tiny <= value <= torch.finfo(torch.float32).max:
        raise CheckpointError(f"{stored.name} is damaged: {value}; a scale is finite and greater than 0")
    return value
