"""Where exact numerics can be had, asked before anything is loaded."""

from __future__ import annotations

import torch

from gemray_kernels.numerics import ALIGNMENT, NUM_SHARDS
from gemray_workers.config import EngineConfig
from gemray_workers.errors import InvalidField
from gemray_workers.model.config import ModelConfig

_CAPABILITY = 9
"""Major compute capability of the cards whose matrix units the exact kernels are written and tested for."""


def require_exact(config: EngineConfig, model: ModelConfig) -> None:
    """Raise InvalidField where `config` asks for exact numerics and this model, dtype or number of ranks has none."""
    if config.numerics != "exact":
        return
    if config.device == "cuda" and config.dtype not in ("bfloat16", "float32"):
        raise _refused(f"on GPUs exact takes bfloat16 and float32, not {config.dtype}")
    if NUM_SHARDS % config.tensor_parallel_size:
        raise _refused(f"exact takes 1, 2, 4 or {NUM_SHARDS} ranks, not {config.tensor_parallel_size}")
    unit = NUM_SHARDS * (ALIGNMENT if config.device == "cuda" else 1)
    faults = [f"{name} = {size}" for name, size in _summed_dimensions(model) if size % unit]
    if faults:
        raise _refused(f"exact takes multiples of {unit}, which are no {', '.join(faults)}")


def require_exact_device(config: EngineConfig, device: torch.device) -> None:
    """Raise InvalidField where this card is none that exact numerics are tested on, and they are asked for."""
    if config.numerics != "exact" or device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major != _CAPABILITY:
        raise _refused(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, exact takes {_CAPABILITY}.x"
        )


def _refused(why: str) -> InvalidField:
    return InvalidField("numerics", "exact", f"fast: {why}")


def _summed_dimensions(model: ModelConfig) -> list[tuple[str, int]]:
    """Inputs of the layers that are split over ranks by them."""
    heads = sorted({model.num_attention_heads * layer.head_dim for layer in model.layers})
    widths = sorted({layer.intermediate_size for layer in model.layers})
    dimensions = [("num_attention_heads times head_dim", size) for size in heads]
    dimensions += [("intermediate_size", size) for size in widths]
    if model.moe is not None:
        dimensions.append(("moe_intermediate_size", model.moe.intermediate_size))
    return dimensions
