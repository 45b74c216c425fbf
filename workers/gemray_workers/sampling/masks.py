"""Forbidden ids as bit masks on the device: one bit a vocabulary column of this rank, equal masks held once.

Shape legend: M masks, V local vocabulary columns, W 32-bit words of V bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gemray_workers.parallel.shard_indices import ShardIndices

NOTHING_FORBIDDEN = 0
"""The mask that is always there."""


@dataclass(frozen=True)
class Forbidden:
    """Which ids a mask forbids. Ids that no vocabulary has are passed over."""

    allowed: tuple[int, ...]
    """Every id but these is forbidden; empty forbids none."""
    banned: tuple[int, ...]

    def bits(self, shard: ShardIndices) -> NDArray[np.int32]:
        """[W], as `gemray_kernels.slot_tables` lays them out."""
        num_columns = shard.num_elements_padded
        forbidden = np.zeros(-(-num_columns // 32) * 32, dtype=bool)
        if self.allowed:
            forbidden[:num_columns] = True
            forbidden[locate(self.allowed, shard)[0]] = False
        forbidden[locate(self.banned, shard)[0]] = True
        return np.packbits(forbidden, bitorder="little").view("<i4")


class MaskPool:
    """Masks that sequences hold; a mask that none holds any more makes room for another."""

    def __init__(self, num_masks: int, shard: ShardIndices, device: torch.device) -> None:
        """Room for `num_masks` different masks, and the one that forbids nothing."""
        self._shard = shard
        self.masks_MW: Tensor = torch.zeros(
            num_masks + 1, -(-shard.num_elements_padded // 32), dtype=torch.int32, device=device
        )
        self._free = list(range(num_masks, 0, -1))
        self._held: dict[Forbidden, _Holding] = {}
        self._by_mask: dict[int, Forbidden] = {}

    def __len__(self) -> int:
        """How many different masks are held."""
        return len(self._held)

    def hold(self, forbidden: Forbidden) -> int:
        """Hold the mask of these ids; each `hold` must be followed by one `drop`."""
        if not forbidden.allowed and not forbidden.banned:
            return NOTHING_FORBIDDEN
        holding = self._held.get(forbidden)
        if holding is None:
            mask = self._free.pop()
            bits = torch.from_numpy(forbidden.bits(self._shard))
            self.masks_MW[mask] = bits.to(self.masks_MW.device, non_blocking=True)
            holding = self._held[forbidden] = _Holding(mask)
            self._by_mask[mask] = forbidden
        holding.count += 1
        return holding.mask

    def drop(self, mask: int) -> None:
        """Give back what `hold` returned."""
        if mask == NOTHING_FORBIDDEN:
            return
        holding = self._held[self._by_mask[mask]]
        holding.count -= 1
        if holding.count == 0:
            del self._held[self._by_mask.pop(mask)]
            self._free.append(mask)


@dataclass
class _Holding:
    mask: int
    count: int = 0


def locate(ids: Sequence[int] | NDArray[np.int64], shard: ShardIndices) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(this rank's columns, which ids have one): columns of the ids that this rank holds, in their order."""
    array = np.asarray(ids, dtype=np.int64)
    in_org = (array >= shard.org_vocab_start_index) & (array < shard.org_vocab_end_index)
    in_added = (array >= shard.added_vocab_start_index) & (array < shard.added_vocab_end_index)
    added_column = array - shard.added_vocab_start_index + shard.num_org_elements_padded
    columns = np.where(in_org, array - shard.org_vocab_start_index, added_column)
    is_here = in_org | in_added
    return columns[is_here], is_here
