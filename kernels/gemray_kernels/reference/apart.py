"""Elementwise functions whose results do not depend on where an element lies.

PyTorch's CPU computes exp, tanh and their like by vectors, and what remains at the end of a tensor or of a thread's
part of it by other code, whose last bits differ. Where a row's bits must not depend on the rows beside it, its elements
are laid apart first: then every one of them takes the scalar code.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apart(x: Tensor) -> Tensor:
    """The same elements, no two of them neighbours in memory; on a GPU, where all take the same code, `x` itself."""
    if x.is_cuda:
        return x
    return torch.stack([x, x], dim=-1)[..., 0]
