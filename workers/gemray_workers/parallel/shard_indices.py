"""Which vocabulary rows a tensor-parallel rank holds (spec section 6.2).

A vocabulary is `org` ids (the checkpoint's) followed by `added` ids. Both regions are padded and split evenly
over the ranks, so one rank's local rows are ``[org | org padding | added | added padding]``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from gemray_kernels.slot_tables import Columns

VOCAB_PADDING = 64


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class ShardIndices:
    """The vocabulary rows of one rank. Ranges are half-open; field names are those of spec 6.2."""

    padded_org_vocab_start_index: int
    padded_org_vocab_end_index: int
    padded_added_vocab_start_index: int
    padded_added_vocab_end_index: int
    org_vocab_start_index: int
    org_vocab_end_index: int
    added_vocab_start_index: int
    added_vocab_end_index: int

    @classmethod
    def of_rank(
        cls, rank: int, size: int, *, org_vocab_size: int, num_added: int = 0, padding: int = VOCAB_PADDING
    ) -> ShardIndices:
        """The record of `rank` among `size` ranks; the padded vocabulary must divide by `size`."""
        org_padded = _round_up(org_vocab_size, padding)
        added_padded = _round_up(org_padded + num_added, padding) - org_padded
        if org_padded % size or added_padded % size:
            raise ValueError(
                f"a vocabulary padded to {org_padded} + {added_padded} rows does not split over {size} ranks"
            )
        org_rows, added_rows = org_padded // size, added_padded // size
        total = org_vocab_size + num_added
        org_start, added_start = rank * org_rows, org_vocab_size + rank * added_rows
        return cls(
            padded_org_vocab_start_index=org_start,
            padded_org_vocab_end_index=org_start + org_rows,
            padded_added_vocab_start_index=added_start,
            padded_added_vocab_end_index=added_start + added_rows,
            org_vocab_start_index=min(org_start, org_vocab_size),
            org_vocab_end_index=min(org_start + org_rows, org_vocab_size),
            added_vocab_start_index=min(added_start, total),
            added_vocab_end_index=min(added_start + added_rows, total),
        )

    @property
    def num_org_elements(self) -> int:
        """Real checkpoint ids on this rank."""
        return self.org_vocab_end_index - self.org_vocab_start_index

    @property
    def num_added_elements(self) -> int:
        """Real added ids on this rank."""
        return self.added_vocab_end_index - self.added_vocab_start_index

    @property
    def num_org_elements_padded(self) -> int:
        """Rows of the org region on this rank, padding included."""
        return self.padded_org_vocab_end_index - self.padded_org_vocab_start_index

    @property
    def num_added_elements_padded(self) -> int:
        """Rows of the added region on this rank, padding included."""
        return self.padded_added_vocab_end_index - self.padded_added_vocab_start_index

    @property
    def num_org_vocab_padding(self) -> int:
        """Padding rows behind the org ids."""
        return self.num_org_elements_padded - self.num_org_elements

    @property
    def num_added_vocab_padding(self) -> int:
        """Padding rows behind the added ids."""
        return self.num_added_elements_padded - self.num_added_elements

    @property
    def num_elements_padded(self) -> int:
        """All local rows: the height of this rank's embedding shard."""
        return self.num_org_elements_padded + self.num_added_elements_padded

    def record(self) -> dict[str, int]:
        """Every field and derived count by its name of spec 6.2."""
        derived = (
            "num_org_elements",
            "num_added_elements",
            "num_org_elements_padded",
            "num_added_elements_padded",
            "num_org_vocab_padding",
            "num_added_vocab_padding",
            "num_elements_padded",
        )
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def local_rows(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map ids (any shape) to (local rows, whether this rank holds them); absent ids map to row 0."""
        in_org = (token_ids >= self.org_vocab_start_index) & (token_ids < self.org_vocab_end_index)
        in_added = (token_ids >= self.added_vocab_start_index) & (token_ids < self.added_vocab_end_index)
        org_row = token_ids - self.org_vocab_start_index
        added_row = token_ids - self.added_vocab_start_index + self.num_org_elements_padded
        rows = torch.where(in_org, org_row, torch.where(in_added, added_row, 0))
        return rows, in_org | in_added

    def global_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """The id of every local row, int64 [num_elements_padded]; padding rows hold -1. Not to be written to: every
        step asks for it, and gets the same tensor."""
        return _global_ids(self, torch.device(device))


@cache
def _global_ids(shard: ShardIndices, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # whichever step asks first, later ones may be outside of it
        # On the CPU: what has to do with numbers on the meta device takes torch._dynamo, 1.5 s of CPU time to import.
        ids = torch.full((shard.num_elements_padded,), -1, dtype=torch.int64)
        ids[: shard.num_org_elements] = torch.arange(shard.org_vocab_start_index, shard.org_vocab_end_index)
        added = shard.num_org_elements_padded
        ids[added : added + shard.num_added_elements] = torch.arange(
            shard.added_vocab_start_index, shard.added_vocab_end_index
        )
        return ids.to(device)


def columns_of(shard: ShardIndices, device: torch.device) -> Columns:
    """Describe a rank's vocabulary as kernels want it."""
    return Columns(
        ids_V=shard.global_ids(device),
        first_id=shard.org_vocab_start_index,
        num_ids=shard.num_org_elements,
        added_column=shard.num_org_elements_padded,
        first_added_id=shard.added_vocab_start_index,
        num_added=shard.num_added_elements,
    )
