"""Keys and values as 8-bit floats (e4m3) with one scale for all of a layer's keys and one for its values.

A number x is kept as ``round(x / scale)``, saturating at ±448, and read as that times the scale. The product with the
reciprocal of the scale and the rounding are those of the compute dtype, so that every device keeps the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.precision import compute_dtype

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of the format, which has no infinity."""


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """`x` over `scale`, rounded to e4m3 (to even where it lies between two) and clamped to ±448; NaN stays NaN."""
    scaled = x.to(compute_dtype(x.dtype)) * (1.0 / scale)
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def check_scales(k_pages: Tensor, k_scale: float, v_scale: float) -> None:
    """Raise ValueError for scales of pages that hold no 8-bit floats: nothing would apply them."""
    if k_pages.dtype != FP8 and (k_scale, v_scale) != (1.0, 1.0):
        raise ValueError(f"scales {k_scale} and {v_scale} are of {FP8} pages; these are {k_pages.dtype}")
