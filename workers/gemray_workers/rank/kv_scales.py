"""The scales of an 8-bit KV cache, read before memory is taken, and the devices that can have one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gemray_workers.checkpoint.quantized.kv_cache import FP8_E4M3, read_kv_scales
from gemray_workers.config import EngineConfig
from gemray_workers.errors import InvalidField
from gemray_workers.kv.scales import KVScales
from gemray_workers.model.config import ModelConfig

_LEAST_CAPABILITY = (8, 9)
"""Compute capability from which cards convert e4m3."""


def kv_scales(config: EngineConfig, model: ModelConfig) -> Mapping[int, KVScales]:
    """What the checkpoint says for each layer that owns KV; empty, which is 1 for all, where it says nothing, where
    weights are random, and where pages hold the model's dtype.

    Raises:
        InvalidField: scales of another format.
        CheckpointError: scales that are missing for some layers, or damaged.
    """
    if config.kv_dtype != FP8_E4M3 or config.random_weights:
        return {}
    found = read_kv_scales(
        config.model_path,
        prefix=model.weight_prefix,
        layers=[layer for owners in model.kv_owners.values() for layer in owners],
        kv_cache=None if model.quantization is None else model.quantization.kv_cache,
    )
    return {layer: KVScales(*scales) for layer, scales in found.items()}


def require_fp8_device(config: EngineConfig, device: torch.device) -> None:
    """Raise InvalidField where this card has no 8-bit floats and they are asked for."""
    if config.kv_dtype != FP8_E4M3 or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise InvalidField(
            "kv_dtype",
            FP8_E4M3,
            f"auto: {torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, "
            f"8-bit floats take {_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]}",
        )
