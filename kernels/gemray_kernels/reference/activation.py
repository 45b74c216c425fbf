"""The gated activation of Gemma's MLPs (Shazeer, arXiv 2002.05202, with the tanh form of GELU; spec 1.7)."""

from __future__ import annotations

import torch
from torch import Tensor


def gelu_tanh_and_mul(gate_up_TI: Tensor) -> Tensor:
    """``gelu_tanh(gate) · up`` [..., I] of ``[gate | up]`` [..., 2 I]."""
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return gelu_tanh(gate_TI) * up_TI


def gelu_tanh(x: Tensor) -> Tensor:
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))``, elementwise."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """``silu(gate) · up`` [..., I] of ``[gate | up]`` [..., 2 I]."""
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return silu(gate_TI) * up_TI


def silu(x: Tensor) -> Tensor:
    """``x · sigmoid(x)``, elementwise."""
    return torch.nn.functional.silu(x)
