"""Rotary position embedding in the rotate-half layout (Su et al., arXiv 2104.09864; spec 1.5).

Shape legend: T rows, N heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def inverse_frequencies(
    head_dim: int,
    theta: float,
    *,
    partial_rotary_factor: float = 1.0,
    factor: float = 1.0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Angular steps a position, float32 [D / 2]; pair m rotates dims m and m + D / 2.

    With a `partial_rotary_factor` below 1 ("proportional" RoPE) the first ``int(factor · D / 2)`` pairs rotate, at
    the frequencies they have in a full rotation of D dims, and the others stand still: this is not ordinary
    partial RoPE, which packs the rotating dims together. `factor` divides every frequency.
    """
    frequencies = torch.zeros(head_dim // 2, dtype=torch.float32, device=device)
    if frequencies.is_meta:  # has no numbers, and torch would import torch._dynamo to count there, 1.5 s of CPU time
        return frequencies
    num_rotating = rotating_pairs(head_dim, partial_rotary_factor)
    exponents = torch.arange(0, 2 * num_rotating, 2, dtype=torch.float32, device=device) / head_dim
    frequencies[:num_rotating] = 1.0 / theta**exponents / factor
    return frequencies


def rotating_pairs(head_dim: int, partial_rotary_factor: float) -> int:
    """Pairs of dims (m, m + D / 2) that rotate: those with m below this."""
    return int(partial_rotary_factor * head_dim // 2)


def rope_cos_sin(positions_T: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, D] of `dtype`. Angles are float32 whatever `dtype` is, as the model was trained."""
    angles = positions_T.to(torch.float32)[:, None] * frequencies
    angles_T1D = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles_T1D.cos().to(dtype), angles_T1D.sin().to(dtype)


def rope_tables(
    positions_T: Tensor, frequencies: Sequence[Tensor], dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Compute `rope_cos_sin` of the same positions for each of several layer types."""
    return tuple(rope_cos_sin(positions_T, frequencies_H, dtype) for frequencies_H in frequencies)


def apply_rope(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate every head of `x` by its row's angles; x's shape and dtype."""
    first, second = x_TND.chunk(2, dim=-1)
    return x_TND * cos_T1D + torch.cat((-second, first), dim=-1) * sin_T1D
