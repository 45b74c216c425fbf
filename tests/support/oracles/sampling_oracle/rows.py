"""The sampling parameters of a step's logits rows, as tensors, and how each row will be chosen.

Every rank builds the same `SamplingRows`, so every rank knows which collectives the step needs without asking.

Shape legend: R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_workers.sampling.params import SamplingParams
from support.oracles.sampling_oracle.edits import LogitEdits
from support.oracles.sampling_oracle.row_request import RowRequest

__all__ = ["MAX_CANDIDATES", "RowGroups", "RowRequest", "SamplingRows"]

MAX_CANDIDATES = 1024
"""Widest top_k that is served from candidates; a wider one shares all logits, or a single request with a huge
top_k would widen the messages of every row in the batch."""


@dataclass(frozen=True)
class RowGroups:
    """The rows by how they are chosen, as int64 indices; together they are all rows, each once."""

    greedy: Tensor
    """T = 0: argmax of the logits."""
    noisy: Tensor
    """T > 0 and at most min_p: argmax of logits / T + noise."""
    candidates: Tensor
    """T > 0 and top_k: each rank offers its largest logits."""
    general: Tensor
    """T > 0 and top_p alone (or top_k beyond MAX_CANDIDATES): each rank offers all its logits."""
    num_candidates: int
    """The largest top_k among `candidates`."""
    noisy_min_p: bool
    """Whether a row of `noisy` has min_p, so that the ranks must agree on the largest logit first."""


@dataclass(frozen=True)
class SamplingRows:
    """One entry a logits row."""

    position_R: Tensor
    """int64: absolute position of the token to be chosen."""
    seed_R: Tensor
    """int64: the bits of the request's uint64 seed."""
    temperature_R: Tensor
    """float64; 0 is greedy."""
    top_k_R: Tensor
    """int64; 0 keeps all."""
    top_p_R: Tensor
    """float64."""
    min_p_R: Tensor
    """float64."""
    groups: RowGroups
    edits: LogitEdits

    @classmethod
    def build(cls, requests: Sequence[RowRequest], device: torch.device | str = "cpu") -> SamplingRows:
        """One row a request, in order. Equal requests give equal rows on every rank."""
        params = [request.params for request in requests]

        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

        def floats(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)

        return cls.of(
            requests,
            position_R=integers([request.position for request in requests]),
            seed_R=integers([signed_seed(p.seed) for p in params]),
            temperature_R=floats([p.temperature for p in params]),
            top_k_R=integers([p.top_k for p in params]),
            top_p_R=floats([p.top_p for p in params]),
            min_p_R=floats([p.min_p for p in params]),
        )

    @classmethod
    def of(
        cls,
        requests: Sequence[RowRequest],
        *,
        position_R: Tensor,
        seed_R: Tensor,
        temperature_R: Tensor,
        top_k_R: Tensor,
        top_p_R: Tensor,
        min_p_R: Tensor,
    ) -> SamplingRows:
        """The same from tensors that hold what `requests` say."""
        return cls(
            position_R=position_R,
            seed_R=seed_R,
            temperature_R=temperature_R,
            top_k_R=top_k_R,
            top_p_R=top_p_R,
            min_p_R=min_p_R,
            groups=_group([request.params for request in requests], position_R.device),
            edits=LogitEdits.build(requests),
        )

    def __len__(self) -> int:
        return len(self.position_R)


def _group(params: Sequence[SamplingParams], device: torch.device | str) -> RowGroups:
    greedy, noisy, candidates, general = [list[int]() for _ in range(4)]
    for row, p in enumerate(params):
        if p.temperature == 0.0:
            greedy.append(row)
        elif 0 < p.top_k <= MAX_CANDIDATES:
            candidates.append(row)
        elif p.top_k > 0 or p.top_p < 1.0:
            general.append(row)
        else:
            noisy.append(row)

    def indices(rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)

    return RowGroups(
        greedy=indices(greedy),
        noisy=indices(noisy),
        candidates=indices(candidates),
        general=indices(general),
        num_candidates=max((params[row].top_k for row in candidates), default=0),
        noisy_min_p=any(params[row].min_p > 0.0 for row in noisy),
    )


def signed_seed(seed: int) -> int:
    """The int64 with the bits of a uint64."""
    return seed - 2**64 if seed >= 2**63 else seed
