"""Tensors that show memory without keeping it.

What a graph gives is read before the next graph runs, so graphs may write their outputs over each other's: a tensor
that stands for an output must not keep the allocator from giving its memory to the next capture.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class _Bytes:
    """Memory by its address, in the interfaces that NumPy and PyTorch read. It frees nothing."""

    def __init__(self, tensor: Tensor) -> None:
        described: dict[str, Any] = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        if tensor.is_cuda:
            self.__cuda_array_interface__ = described
        else:
            self.__array_interface__ = described


def unowned(tensor: Tensor) -> Tensor:
    """The same numbers at the same place, in a tensor whose life does not lengthen that of the memory.

    It is for whoever knows that the memory is still there, as that of a graph's private pool is. An empty or strided
    tensor comes back as it is.

    Args:
        tensor: on a card or a CPU.
    """
    if not tensor.numel() or not tensor.is_contiguous():
        return tensor
    shown = _Bytes(tensor)
    bytes_B = torch.as_tensor(shown, device=tensor.device) if tensor.is_cuda else torch.from_numpy(np.asarray(shown))
    return bytes_B.view(tensor.dtype).view(tensor.shape)
