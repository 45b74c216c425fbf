"""Decoding one request the plain way: one token at a time, whole logits, filters written in Python numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gemray_kernels.reference.keyed_noise import keyed_gumbel
from gemray_workers.messages import Submit
from support.oracles.oracle import solo_model, whole_logits
from support.oracles.paged import PagedCache, Rows
from support.oracles.sampling_reference import edited, filtered_law


def plain_decode(directory: Path | str, submit: Submit, *, max_model_len: int = 256) -> list[int]:
    """The ids that a request must get, stop id included: float64, TP 1, nothing shared with the engine's step."""
    model = solo_model(directory, torch.float64)
    params, prompt = submit.params, submit.prompt_ids
    cache = PagedCache(model.config, num_sequences=1, max_len=max_model_len, dtype=torch.float64)
    output: list[int] = []
    pending, computed = list(prompt), 0
    while len(output) < params.max_tokens and len(prompt) + len(output) < max_model_len:
        batch = cache.batch([Rows(0, pending, computed)])
        hidden_TH = model.forward(batch, cache.caches).hidden_TH
        logits_V = whole_logits(model, model.logits(hidden_TH[-1:]))[0]
        output.append(_choose(logits_V, submit, output))
        computed += len(pending)
        pending = [output[-1]]
        if output[-1] in params.stop_token_ids and len(output) > params.min_tokens:
            break
    return output


def _choose(logits_V: Tensor, submit: Submit, output: list[int]) -> int:
    params = submit.params
    row = edited(logits_V.tolist(), params, submit.prompt_ids, output)
    law, _ = filtered_law(row, params)
    if params.temperature == 0:
        return next(iter(law))
    ids = sorted(law)
    position = torch.tensor([len(submit.prompt_ids) + len(output)])
    noise = keyed_gumbel(_signed(params.seed), position, torch.tensor([ids]), torch.float64)[0]
    scores = {v: row[v] / params.temperature + g for v, g in zip(ids, noise.tolist(), strict=True)}
    return max(ids, key=lambda v: (scores[v], -v))


def _signed(seed: int) -> Tensor:
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
