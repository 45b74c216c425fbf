"""How the Triton kernels expect tensors to lie in memory: any other layout is refused."""

from __future__ import annotations

from torch import Tensor


def require_rows(**tensors: Tensor) -> None:
    """Raise ValueError unless the last axis of each tensor is contiguous; other axes may have any stride."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"the last axis of {name} must be contiguous; {_layout(tensor)} is not")


def require_contiguous(**tensors: Tensor) -> None:
    """Raise ValueError unless each tensor is contiguous as a whole."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; {_layout(tensor)} is not")


def aligned(count: int, itemsize: int) -> int:
    """Round `count` elements of `itemsize` bytes up, so that what lies behind them begins at a multiple of 16 bytes.

    Triton compiles a program anew for a pointer that does not, and a server must not compile while it serves.
    """
    step = 16 // itemsize
    return -(-count // step) * step


def _layout(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)} with strides {list(tensor.stride())}"
