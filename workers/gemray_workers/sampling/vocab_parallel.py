"""Finding the best ids of a vocabulary that is split over ranks, as if it were whole (spec section 6.3).

Each rank offers `Candidates`, (value, id) pairs of its own columns; one all-gather brings all offers together, and what
follows is computed alike on every rank. Equal values are ordered by id, smallest first: with added vocabulary rank
order is not id order, so ids decide, never ranks.

Shape legend: R rows, C candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemray_kernels.candidates import Candidates
from gemray_workers.parallel.communicator import Communicator


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
