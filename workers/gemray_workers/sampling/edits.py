"""Per-row edits of logits: which ids a request forbids, penalises or favours.

In this order: allowed_token_ids, suppress_tokens, min_tokens, repetition penalty (ids of prompt and output),
presence and frequency penalties (ids of the output), logit_bias. They define the target's distribution, so they
come before temperature and filters, on plain and verify rows alike (spec section 7).

Edits are sparse (row, id) entries kept on the CPU: each rank picks there the entries of its own vocabulary shard
and sends only those to its device, without waiting for it.

Shape legend: R rows, V local vocabulary columns, N entries, L rows with an allow-list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.row_request import RowRequest, wants_history


@dataclass(frozen=True)
class Entries:
    """Sparse values at (row, token id); at most one entry a pair, except where repeating changes nothing."""

    row_N: Tensor
    """int64, CPU."""
    id_N: Tensor
    """int64, CPU."""
    value_N: Tensor
    """float64, CPU."""

    @classmethod
    def of_rows(cls, values_by_row: Iterable[tuple[int, Mapping[int, float]]]) -> Entries:
        """From (row, {id: value}) pairs."""
        flat = [(row, token, value) for row, values in values_by_row for token, value in values.items()]
        rows, ids, values = zip(*flat, strict=True) if flat else ((), (), ())
        return cls(
            torch.tensor(rows, dtype=torch.int64),
            torch.tensor(ids, dtype=torch.int64),
            torch.tensor(values, dtype=torch.float64),
        )

    def on_shard(self, shard: ShardIndices, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, local columns, values) of the entries that `shard` holds, on the device and dtype of `like`."""
        columns_N, held_N = shard.local_rows(self.id_N)
        return (
            self.row_N[held_N].to(like.device, non_blocking=True),
            columns_N[held_N].to(like.device, non_blocking=True),
            self.value_N[held_N].to(like.device, like.dtype, non_blocking=True),
        )


@dataclass(frozen=True)
class LogitEdits:
    """The edits of all rows of a step."""

    restricted_L: Tensor
    """int64, CPU: rows that have an allow-list."""
    allowed: Entries
    """Ids they may choose; rows count within `restricted_L`."""
    banned: Entries
    repetition: Entries
    """Values are penalties: they divide positive logits and multiply negative ones."""
    occurrence: Entries
    """Values are subtracted: presence + frequency * count."""
    bias: Entries
    """Values are added."""

    @classmethod
    def build(cls, requests: Sequence[RowRequest]) -> LogitEdits:
        """The edits that each row's parameters and history ask for."""
        rows = list(enumerate(requests))
        restricted = [
            (row, request.params.allowed_token_ids) for row, request in rows if request.params.allowed_token_ids
        ]
        penalised = [(row, request) for row, request in rows if wants_history(request.params)]
        return cls(
            restricted_L=torch.tensor([row for row, _ in restricted], dtype=torch.int64),
            allowed=Entries.of_rows((i, dict.fromkeys(ids, 0.0)) for i, (_, ids) in enumerate(restricted)),
            banned=Entries.of_rows((row, dict.fromkeys(_banned_ids(request), 0.0)) for row, request in rows),
            repetition=Entries.of_rows((row, _repetition(request)) for row, request in penalised),
            occurrence=Entries.of_rows((row, _occurrence(request)) for row, request in penalised),
            bias=Entries.of_rows((row, request.params.logit_bias) for row, request in rows),
        )

    @property
    def is_empty(self) -> bool:
        """Whether no row is edited."""
        return not len(self.restricted_L) and not any(
            len(entries.row_N) for entries in (self.banned, self.repetition, self.occurrence, self.bias)
        )


def apply_edits(logits_RV: Tensor, edits: LogitEdits, shard: ShardIndices) -> Tensor:
    """Edit a rank's local logits; the input stays as it is (it is returned itself when there is nothing to edit).

    Forbidding subtracts infinity rather than writing it: a NaN stays visible. A row whose ids are all forbidden
    becomes all -inf, which `choose_tokens` reports as a fault of that row.
    """
    if edits.is_empty:
        return logits_RV
    edited_RV = logits_RV.clone()
    if len(edits.restricted_L):
        row, column, _ = edits.allowed.on_shard(shard, logits_RV)
        restricted_L = edits.restricted_L.to(logits_RV.device, non_blocking=True)
        distance_LV = torch.full_like(logits_RV[restricted_L], torch.inf)
        distance_LV[row, column] = 0.0
        edited_RV[restricted_L] -= distance_LV
    row, column, _ = edits.banned.on_shard(shard, logits_RV)
    edited_RV[row, column] -= torch.inf
    row, column, penalty = edits.repetition.on_shard(shard, logits_RV)
    logit = edited_RV[row, column]
    edited_RV[row, column] = torch.where(logit > 0, logit / penalty, logit * penalty)
    row, column, penalty = edits.occurrence.on_shard(shard, logits_RV)
    edited_RV[row, column] -= penalty
    row, column, bias = edits.bias.on_shard(shard, logits_RV)
    edited_RV[row, column] += bias
    return edited_RV


def _banned_ids(request: RowRequest) -> tuple[int, ...]:
    params = request.params
    if request.num_generated < params.min_tokens:
        return params.suppress_tokens + params.stop_token_ids
    return params.suppress_tokens


def _repetition(request: RowRequest) -> dict[int, float]:
    penalty = request.params.repetition_penalty
    if penalty == 1.0:
        return {}
    return dict.fromkeys(np.unique(np.asarray(request.history, dtype=np.int64)).tolist(), penalty)


def _occurrence(request: RowRequest) -> dict[int, float]:
    params = request.params
    if params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        return {}
    output = np.asarray(request.history[request.prompt_len :], dtype=np.int64)
    ids, counts = np.unique(output, return_counts=True)
    penalties = params.presence_penalty + params.frequency_penalty * counts
    return dict(zip(ids.tolist(), penalties.tolist(), strict=True))
