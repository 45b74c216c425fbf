"""Small tensors between the host and the device, copied without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """`values` as an int64 tensor on `device`.

    ``torch.tensor(values, device=...)`` would wait until the device has caught up. The copy made here is queued
    behind what the device still has to do; the host's side of it is done when this returns, so nothing needs to
    outlive the call.
    """
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


class HostResult:
    """A small device tensor on its way to the host."""

    def __init__(self, tensor: Tensor | None) -> None:
        """Enqueue the copy, behind all that the device still has to do."""
        self._done: torch.cuda.Event | None = None
        self._host = tensor
        if tensor is not None and tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def rows(self) -> list[list[int]]:
        """Those of a matrix; waits until they have arrived."""
        rows: list[list[int]] = self._arrived()
        return rows

    def values(self) -> list[int]:
        """Those of a vector; waits until they have arrived."""
        values: list[int] = self._arrived()
        return values

    def _arrived(self) -> Any:
        if self._done is not None:
            self._done.synchronize()
        return [] if self._host is None else self._host.tolist()
