"""Which implementation of the choice's kernels a device uses; all give the same values up to the last digits."""

from __future__ import annotations

import torch

from gemray_kernels.reference.token_choice import ChoiceKernels, ReferenceKernels


def choice_kernels(device: torch.device, dtype: torch.dtype) -> ChoiceKernels:
    """Those for logits of `dtype`: Triton's on CUDA, plain PyTorch elsewhere and for float64."""
    if device.type != "cuda":
        return ReferenceKernels()
    from gemray_kernels.triton import keyed_noise as triton_keyed_noise
    from gemray_kernels.triton import token_choice as triton_token_choice

    if dtype != torch.float32:
        return ReferenceKernels(triton_keyed_noise.keyed_gumbel)
    return triton_token_choice.TritonKernels()
