"""Small tensors from the host, brought to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """`values` as a tensor on `device`.

    ``torch.tensor(values, device=...)`` would wait until the device has caught up. The copy made here is queued
    behind what the device still has to do; the host's side of it is done when this returns, so nothing needs to
    outlive the call.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
