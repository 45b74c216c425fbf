"""A card's memory as one process sees it: what is free, and what its own allocator holds."""

from __future__ import annotations

import gc
from typing import Protocol

import torch


class CardMemory(Protocol):
    """The numbers, in bytes, that KV memory is found by."""

    @property
    def total(self) -> int:
        """All memory of the card."""
        ...

    def free(self) -> int:
        """What no process has now."""
        ...

    def reserved(self) -> int:
        """What this process's allocator holds, in use or kept for later."""
        ...

    def peak(self) -> int:
        """The most that it held since `restart_peak`."""
        ...

    def restart_peak(self) -> None:
        """Forget the peak."""
        ...

    def give_back(self) -> None:
        """Return to the card what the allocator keeps and nobody uses."""
        ...

    def outside(self) -> int:
        """What this process took since it began to look beside its allocator's: NCCL, kernels, libraries.

        Told from what is free, so another process that takes memory meanwhile makes it larger; it is never negative.
        """
        ...


class CudaMemory:
    """A CUDA device's."""

    def __init__(self, device: torch.device) -> None:
        """Begin to look: best before anything of the process is on the card, as that counts as others' memory."""
        self._device = device
        self._free_at_first, self._total = torch.cuda.mem_get_info(device)
        self._reserved_at_first = self.reserved()

    @property
    def total(self) -> int:
        """As in `CardMemory`."""
        return int(self._total)

    def free(self) -> int:
        """As in `CardMemory`."""
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0])

    def reserved(self) -> int:
        """As in `CardMemory`."""
        return int(torch.cuda.memory_reserved(self._device))

    def peak(self) -> int:
        """As in `CardMemory`."""
        return int(torch.cuda.max_memory_reserved(self._device))

    def restart_peak(self) -> None:
        """As in `CardMemory`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def give_back(self) -> None:
        """As in `CardMemory`."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()

    def outside(self) -> int:
        """As in `CardMemory`."""
        taken = self._free_at_first - self.free()
        return max(0, int(taken - (self.reserved() - self._reserved_at_first)))


def card_memory(device: torch.device) -> CardMemory | None:
    """The memory of a card; None for the CPU's, which has no allocator to ask."""
    return CudaMemory(device) if device.type == "cuda" else None
