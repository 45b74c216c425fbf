"""What no product can be computed of: scales out of range, codes that stand for no number, weights that are none."""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_workers.errors import CheckpointError

LARGEST_SCALE = 1e35
"""A code of 448 times 6 and a scale is then still a number in float32."""
SMALLEST_SCALE = 1e-35
"""The same where a scale divides."""
_NO_NUMBER = 0x7F
"""The bits below the sign of an e4m3 code that stands for no number."""


def refuse_damaged_scale(name: str, scale: Tensor) -> None:
    """Raise CheckpointError for scales that no number can be multiplied with, or that make every number 0."""
    wide = scale.float()
    bad = ~((wide >= 0) & (wide <= LARGEST_SCALE))
    if bad.any():
        raise CheckpointError(
            f"{name} is damaged: {int(bad.sum())} of its {wide.numel()} scales are negative, not finite or above "
            f"{LARGEST_SCALE:g} (the first is {wide[bad][0].item()})"
        )
    if not (wide >= SMALLEST_SCALE).any():
        raise CheckpointError(f"{name} is damaged: all of its {wide.numel()} scales are 0 or below {SMALLEST_SCALE:g}")


def refuse_damaged_codes(name: str, codes: Tensor) -> None:
    """Raise CheckpointError for 8-bit floats of which some are no number; every bit of other codes is one."""
    if codes.dtype is not torch.float8_e4m3fn:
        return
    bad = (codes.view(torch.uint8) & _NO_NUMBER) == _NO_NUMBER
    if bad.any():
        raise CheckpointError(f"{name} is damaged: {int(bad.sum())} of {bad.numel()} codes that were read are NaN")


def refuse_damaged_weights(name: str, weights: Tensor) -> None:
    """Raise CheckpointError for plain weights of which some are NaN or infinite."""
    if not weights.is_floating_point() or not weights.numel():
        return
    least, most = torch.aminmax(weights)  # takes about as long as to copy them; isfinite of each takes 30 times that
    if torch.isfinite(least) and torch.isfinite(most):
        return
    bad = int((~torch.isfinite(weights)).sum())
    raise CheckpointError(f"{name} is damaged: {bad} of {weights.numel()} weights that were read are NaN or infinite")
