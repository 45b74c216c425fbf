"""Sampling written the plain way, in Python numbers over a whole vocabulary: what the tests compare with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from gemray_kernels.reference.token_choice import ChoiceKernels
from gemray_workers.parallel.communicator import Communicator, compute_dtype
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.choose import ChosenTokens, choose
from gemray_workers.sampling.features import Features
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.state import SamplingState
from support.oracles.sampling_oracle.row_request import RowRequest

CPU = torch.device("cpu")


def sampling_params(**changes: Any) -> SamplingParams:
    """T = 1 with nothing else on, unless said otherwise."""
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "max_tokens": 8}
    return SamplingParams(**{**plain, **changes})


def local_columns(logits_RV: Tensor, shard: ShardIndices) -> Tensor:
    """A rank's columns of whole logits, padding at -inf."""
    ids = shard.global_ids()
    return logits_RV[:, ids.clamp(min=0)].masked_fill(ids < 0, -torch.inf)


def filtered_law(logits: Sequence[float], params: SamplingParams) -> tuple[dict[int, float], float]:
    """(id -> probability of the ids that the filters keep, how close top_p came to another cut)."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    order = [v for v in order if logits[v] > -math.inf]
    if params.temperature == 0:
        return {order[0]: 1.0}, 1.0
    weight = {v: math.exp((logits[v] - logits[order[0]]) / params.temperature) for v in order}
    if params.top_k > 0:
        order = order[: params.top_k]
    margin = 1.0
    if params.top_p < 1:
        total = math.fsum(weight[v] for v in order)
        prefix: list[int] = []
        while True:
            prefix.append(order[len(prefix)])
            mass = math.fsum(weight[v] for v in prefix) / total
            margin = min(margin, abs(mass - params.top_p))
            if mass >= params.top_p or len(prefix) == len(order):
                break
        order = prefix
    order = [v for v in order if weight[v] >= params.min_p * weight[order[0]]]
    total = math.fsum(weight[v] for v in order)
    return {v: weight[v] / total for v in order}, margin


def edited(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """One row's logits after its edits, in the documented order."""
    row = list(logits)
    counts, seen = Counter(output), {*prompt, *output}
    completing = {word[-1] for word in params.bad_words if tuple(output[1 - len(word) :]) == word[:-1]}
    for v in range(len(row)):
        forbidden = bool(params.allowed_token_ids) and v not in params.allowed_token_ids
        forbidden |= v in params.suppress_tokens or v in completing
        forbidden |= len(output) < params.min_tokens and v in params.stop_token_ids
        if forbidden:
            row[v] = -math.inf
        if v in seen:
            row[v] = row[v] / params.repetition_penalty if row[v] > 0 else row[v] * params.repetition_penalty
        row[v] -= params.frequency_penalty * counts[v] + (params.presence_penalty if counts[v] else 0.0)
        row[v] += params.logit_bias.get(v, 0.0)
    return row


def choose_rows(
    logits_RV: Tensor,
    requests: Sequence[RowRequest],
    shard: ShardIndices,
    comm: Communicator,
    *,
    kernels: ChoiceKernels | None = None,
    features: Features | None = None,
    device: torch.device = CPU,
    softcap: float | None = None,
) -> ChosenTokens:
    """Choose for rows written out one by one, through the tables of slots."""
    rows = SlotRows(requests, shard, compute_dtype(logits_RV.dtype), device, kernels)
    return choose(
        logits_RV.to(device),
        rows.slot_R,
        rows.position_R,
        rows.state,
        comm,
        features=features,
        drafts_RB=rows.drafts_RB,
        softcap=softcap,
    )


def edited_rows(logits_RV: Tensor, requests: Sequence[RowRequest], shard: ShardIndices) -> Tensor:
    """A rank's logits as the distribution of each row has them."""
    rows = SlotRows(requests, shard, logits_RV.dtype)
    choice_rows = rows.state.rows(rows.state.features, rows.slot_R, rows.position_R, rows.drafts_RB)
    return rows.state.kernels.edited_logits(logits_RV, choice_rows, rows.state.columns)


class SlotRows:
    """Rows written out one by one, as tables of slots; rows of equal parameters and history share a slot."""

    def __init__(
        self,
        requests: Sequence[RowRequest],
        shard: ShardIndices,
        dtype: torch.dtype,
        device: torch.device = CPU,
        kernels: ChoiceKernels | None = None,
    ) -> None:
        self.state = SamplingState(len(requests), shard, dtype, device, kernels)
        slots: dict[bytes, int] = {}
        for request in requests:
            key = _slot_key(request)
            if key not in slots:
                slots[key] = len(slots)
                self.state.admit(slots[key], request.params, request.token_ids, request.prompt_len)
        most = max((len(request.draft_ids) for request in requests), default=0)
        drafts = [[*request.draft_ids, *[-1] * (most - len(request.draft_ids))] for request in requests]
        self.slot_R = torch.tensor([slots[_slot_key(r)] for r in requests], dtype=torch.int64, device=device)
        self.position_R = torch.tensor([r.position for r in requests], dtype=torch.int64, device=device)
        self.drafts_RB = torch.tensor(drafts, dtype=torch.int64, device=device).view(-1, most) if most else None


def _slot_key(request: RowRequest) -> bytes:
    return msgspec.msgpack.encode((request.params, list(request.token_ids), request.prompt_len))
