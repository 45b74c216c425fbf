"""Which implementation of each kernel a device and dtype use, chosen once for a model and handed to its layers.

The attention kernel is not here: it is chosen by name, with reasons (`gemray_workers.attention.choice`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_kernels.reference import activation, experts, norm_rope, rms_norm, rope


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One implementation of each; signatures and results are those of the references."""

    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor]
    rms_norm_then_scale: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
    apply_rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    norm_rope: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
    write_normed_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor, Tensor], None]
    gelu_tanh_and_mul: Callable[[Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    choose_experts: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    gated_experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


REFERENCE = Kernels(
    rms_norm=rms_norm.rms_norm,
    rms_norm_then_scale=rms_norm.rms_norm_then_scale,
    add_rms_norm=rms_norm.add_rms_norm,
    apply_rope=rope.apply_rope,
    norm_rope=norm_rope.norm_rope,
    write_normed_kv=norm_rope.write_normed_kv,
    gelu_tanh_and_mul=activation.gelu_tanh_and_mul,
    silu_and_mul=activation.silu_and_mul,
    choose_experts=experts.choose_experts,
    gated_experts=experts.gated_experts,
)
"""Plain PyTorch, for every device and dtype."""


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Triton on CUDA for the dtypes that are served; the references for the rest, float64 among it."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float32):
        return REFERENCE
    return triton_kernels()


def triton_kernels() -> Kernels:
    """Every kernel in Triton. Imports triton, which only CUDA builds of torch bring along."""
    from gemray_kernels.triton import activation as triton_activation
    from gemray_kernels.triton import experts as triton_experts
    from gemray_kernels.triton import norm_rope as triton_norm_rope
    from gemray_kernels.triton import rms_norm as triton_rms_norm

    return Kernels(
        rms_norm=triton_rms_norm.rms_norm,
        rms_norm_then_scale=triton_rms_norm.rms_norm_then_scale,
        add_rms_norm=triton_rms_norm.add_rms_norm,
        apply_rope=triton_norm_rope.apply_rope,
        norm_rope=triton_norm_rope.norm_rope,
        write_normed_kv=triton_norm_rope.write_normed_kv,
        gelu_tanh_and_mul=triton_activation.gelu_tanh_and_mul,
        silu_and_mul=triton_activation.silu_and_mul,
        choose_experts=triton_experts.choose_experts,
        gated_experts=triton_experts.gated_experts,
    )
