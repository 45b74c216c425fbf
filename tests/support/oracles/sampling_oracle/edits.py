"""Per-row edits of logits: which ids a request forbids, penalises or favours.

In this order: allowed_token_ids, suppress_tokens, min_tokens, repetition penalty (ids of prompt and output),
presence and frequency penalties (ids of the output), logit_bias. They define the target's distribution, so they
come before temperature and filters, on plain and verify rows alike (spec section 7).

Edits are sparse (row, id) entries kept on the CPU: each rank picks there the entries of its own vocabulary shard
and sends only those to its device, without waiting for it.

Shape legend: R rows, V local vocabulary columns, N entries, L rows with an allow-list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gemray_workers.parallel.shard_indices import ShardIndices
from support.oracles.sampling_oracle.row_request import RowRequest, wants_history


class Edit(NamedTuple):
    """Ids of one row and a value for each."""

    ids: NDArray[np.int64]
    values: NDArray[np.float64]

    @classmethod
    def of_ids(cls, ids: Sequence[int], value: float = 0.0) -> Edit:
        """The same value for every id."""
        return cls(np.asarray(ids, dtype=np.int64), np.full(len(ids), value))


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
    def of_rows(cls, edits_by_row: Iterable[tuple[int, Edit]]) -> Entries:
        """From each row's ids and their values."""
        rows, edits = [], []
        for row, edit in edits_by_row:
            rows.append(np.full(len(edit.ids), row, dtype=np.int64))
            edits.append(edit)
        return cls(
            torch.from_numpy(np.concatenate([np.empty(0, np.int64), *rows])),
            torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(edit.ids for edit in edits)])),
            torch.from_numpy(np.concatenate([np.empty(0, np.float64), *(edit.values for edit in edits)])),
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
        restricted = [(row, request) for row, request in rows if request.params.allowed_token_ids]
        penalised = [(row, request) for row, request in rows if wants_history(request.params)]
        return cls(
            restricted_L=torch.tensor([row for row, _ in restricted], dtype=torch.int64),
            allowed=Entries.of_rows(
                (i, Edit.of_ids(request.params.allowed_token_ids)) for i, (_, request) in enumerate(restricted)
            ),
            banned=Entries.of_rows((row, Edit.of_ids(_banned_ids(request))) for row, request in rows),
            repetition=Entries.of_rows((row, _repetition(request)) for row, request in penalised),
            occurrence=Entries.of_rows((row, _occurrence(request)) for row, request in penalised),
            bias=Entries.of_rows((row, _bias(request)) for row, request in rows if request.params.logit_bias),
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


def _repetition(request: RowRequest) -> Edit:
    penalty = request.params.repetition_penalty
    seen = request.history if penalty != 1.0 else []
    return Edit.of_ids(np.unique(np.asarray(seen, dtype=np.int64)).tolist(), penalty)


def _occurrence(request: RowRequest) -> Edit:
    params = request.params
    wanted = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    output = request.history[request.prompt_len :] if wanted else []
    ids, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
    return Edit(ids, params.presence_penalty + params.frequency_penalty * counts.astype(np.float64))


def _bias(request: RowRequest) -> Edit:
    bias = request.params.logit_bias
    return Edit(np.fromiter(bias.keys(), dtype=np.int64), np.fromiter(bias.values(), dtype=np.float64))
