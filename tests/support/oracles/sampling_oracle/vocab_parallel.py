"""Finding the best ids of a vocabulary that is split over ranks, as if it were whole (spec section 6.3).

Each rank offers `Candidates`, (value, id) pairs of its own columns; one all-gather brings everybody's offers
together, and what follows is computed alike on every rank. Equal values are ordered by id, smallest first: with
added vocabulary rank order is not id order, so ids decide, never ranks.

Shape legend: R rows, V local vocabulary columns, C candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_workers.parallel.communicator import Communicator


@dataclass(frozen=True)
class Candidates:
    """Some ids of each row with a value each. Padding has value -inf and id -1."""

    values_RC: Tensor
    ids_RC: Tensor
    """int64."""

    def largest(self) -> tuple[Tensor, Tensor]:
        """(value_R, id_R) of each row's largest value, the smallest id among equals. A NaN makes the value NaN."""
        value_R = self.values_RC.amax(dim=-1)
        no_id = torch.iinfo(torch.int64).max
        return value_R, self.ids_RC.masked_fill(self.values_RC != value_R[:, None], no_id).amin(dim=-1)

    def sorted(self) -> Candidates:
        """Each row by value descending (NaN first), then by id ascending."""
        ids_RC, by_id_RC = self.ids_RC.sort(dim=-1)
        values_RC, by_value_RC = self.values_RC.gather(-1, by_id_RC).sort(dim=-1, descending=True, stable=True)
        return Candidates(values_RC, ids_RC.gather(-1, by_value_RC))

    def first(self, count: int) -> Candidates:
        """The leading `count` of each row."""
        return Candidates(self.values_RC[:, :count], self.ids_RC[:, :count])


def local_largest(values_RV: Tensor, ids_V: Tensor) -> Candidates:
    """One candidate a row: the rank's largest value, the smallest id among equals (local columns ascend in id)."""
    value_R, column_R = values_RV.max(dim=-1)
    return Candidates(value_R[:, None], ids_V[column_R][:, None])


def local_top(values_RV: Tensor, ids_V: Tensor, count: int) -> Candidates:
    """The rank's `count` largest values of each row (all when it has fewer), unordered, ties to the smallest ids.

    topk alone leaves open which of the values equal to the last one it takes; those are taken anew by column.
    """
    num_columns = values_RV.shape[-1]
    if count >= num_columns:
        return Candidates(values_RV, ids_V.expand_as(values_RV))
    if count == 0:
        return Candidates(values_RV[:, :0], ids_V[:0].expand(len(values_RV), 0))
    top_RC, column_RC = values_RV.topk(count, dim=-1)
    last_R1 = top_RC[:, -1:]
    column_V = torch.arange(num_columns, device=values_RV.device)
    tied_RC = torch.where(values_RV == last_R1, column_V, num_columns - 1).topk(count, dim=-1, largest=False).values
    is_tied_RC = top_RC == last_R1  # false for NaN, which is then kept as topk found it
    nth_tied_RC = (is_tied_RC.cumsum(dim=-1) - 1).clamp(min=0)
    column_RC = torch.where(is_tied_RC, tied_RC.gather(-1, nth_tied_RC), column_RC)
    return Candidates(top_RC, ids_V[column_RC])


def gather_candidates(offers: Sequence[Candidates], comm: Communicator) -> list[Candidates]:
    """Join every rank's offers, each list entry with its own R and C, in a single all-gather.

    Values and ids travel together as float64, which holds float32 and float64 values and ids below 2**53 exactly.
    """
    packed = [torch.stack((offer.values_RC.double(), offer.ids_RC.double())).flatten() for offer in offers]
    everyones = comm.all_gather(torch.cat(packed))
    joined: list[Candidates] = []
    for offer, part in zip(offers, everyones.split_with_sizes([len(p) for p in packed], dim=-1), strict=True):
        # [size, 2, R, C] -> 2 of [R, size * C]
        values, ids = part.view(comm.size, 2, *offer.ids_RC.shape).permute(1, 2, 0, 3).flatten(2)
        joined.append(Candidates(values.to(offer.values_RC.dtype), ids.long()))
    return joined
