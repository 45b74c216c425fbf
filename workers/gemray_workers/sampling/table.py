"""How each slot samples, in device tensors that keep their addresses: rows are gathered from them, never rebuilt.

Shape legend: N slots, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.rows import RowRequest, SamplingRows, signed_seed


class SamplingTable:
    """Seeds and filters of the sequences that hold slots."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._seed_N = torch.zeros(num_slots, dtype=torch.int64, device=device)
        # temperature, top_p, min_p and top_k: one copy to the device brings a sequence's four.
        self._filters_4N = torch.zeros(4, num_slots, dtype=torch.float64, device=device)

    def set(self, slot: int, params: SamplingParams) -> None:
        """A sequence with these parameters takes the slot."""
        filters = [params.temperature, params.top_p, params.min_p, float(params.top_k)]
        self._filters_4N[:, slot] = torch.tensor(filters, dtype=torch.float64)
        self._seed_N[slot] = signed_seed(params.seed)

    def rows(self, slot_R: Tensor, position_R: Tensor, requests: Sequence[RowRequest]) -> SamplingRows:
        """The rows of `requests`, whose slots and positions are given as tensors too."""
        temperature_R, top_p_R, min_p_R, top_k_R = self._filters_4N[:, slot_R].unbind(0)
        return SamplingRows.of(
            requests,
            position_R=position_R,
            seed_R=self._seed_N[slot_R],
            temperature_R=temperature_R,
            top_k_R=top_k_R.long(),
            top_p_R=top_p_R,
            min_p_R=min_p_R,
        )
