"""Ids that single rows forbid, where a grammar says so: unlike a slot's masks they change with every token.

Shape legend: G rows with a mask, R rows, I 32-bit words of the vocabulary's ids, V local vocabulary columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gemray_workers.parallel.shard_indices import ShardIndices


@dataclass(frozen=True)
class RowMasks:
    """Masks of some of the rows that choose a token."""

    row_G: Tensor
    """int64: which rows."""
    forbidden_GV: Tensor
    """bool, over this rank's columns."""

    @classmethod
    def of_ids(
        cls, rows: Sequence[int], allowed_GI: NDArray[np.uint32], shard: ShardIndices, device: torch.device
    ) -> RowMasks:
        """Bring masks over ids to this rank's columns, without waiting for the device.

        Args:
            rows: which rows.
            allowed_GI: bit ``id % 32`` of word ``id // 32`` allows the id.
            shard: this rank's vocabulary.
            device: where the masks go, 1 byte a column.
        """
        bits_GI = np.unpackbits(allowed_GI.astype("<u4").view(np.uint8), axis=1, bitorder="little")
        forbidden_GV = np.ones((len(rows), shard.num_elements_padded), dtype=bool)
        org = slice(shard.org_vocab_start_index, shard.org_vocab_end_index)
        added = slice(shard.added_vocab_start_index, shard.added_vocab_end_index)
        first = shard.num_org_elements_padded
        forbidden_GV[:, : shard.num_org_elements] = bits_GI[:, org] == 0
        forbidden_GV[:, first : first + shard.num_added_elements] = bits_GI[:, added] == 0
        row_G = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
        return cls(row_G, torch.from_numpy(forbidden_GV).to(device, non_blocking=True))

    def apply(self, edited_RV: Tensor) -> Tensor:
        """The logits with what is forbidden at -inf. Infinity is subtracted rather than written, so that a NaN stays
        visible; the input stays as it is."""
        masked_GV = edited_RV[self.row_G]
        masked_GV = torch.where(self.forbidden_GV, masked_GV - torch.inf, masked_GV)
        return edited_RV.index_copy(0, self.row_G, masked_GV)


MakeMasks = Callable[[], RowMasks]
"""Makes masks once they are needed: what they follow from may still be on its way."""
