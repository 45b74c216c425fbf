"""Layers whose keys and values are one projection (spec 1.4, `attention_k_eq_v`).

Values are its normed output, keys the same times a weight, rotated. Rotation moves some dims alone, so the others of a
key need not be read by who reads the value: ``q · k = (q · weight) · v`` over them. Attention over long contexts takes
as long as reading does, and of 31B's keys three quarters stand still.

Shape legend: D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class KeysOfValues:
    """How keys follow from values. Kernels may read keys nevertheless: both give the same up to rounding."""

    weight_D: Tensor
    """By what the dims of a value are multiplied."""
    num_rotating: int
    """Pairs of dims (m, m + D / 2), those with m below this, that are rotated; the others are not."""
