"""Decoding one request the plain way: one token at a time, whole logits, filters written in Python numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gemray_kernels.reference.keyed_noise import keyed_gumbel
from gemray_workers.config import KVDTypeName
from gemray_workers.messages import Submit
from gemray_workers.rank.kv_scales import kv_scales
from support.engine.engine_runner import engine_config
from support.oracles.oracle import solo_model, whole_logits
from support.oracles.paged import PagedCache, Rows
from support.oracles.sampling_reference import edited, filtered_law


@dataclass
class PlainText:
    """What plain decoding puts behind a prompt."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each id under the model's own distribution, before edits and filters."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each of the prompt's tokens from the second on."""


def plain_decode(directory: Path | str, submit: Submit, *, max_model_len: int = 256) -> list[int]:
    """The ids that a request must get, stop id included: float64, TP 1, nothing shared with the engine's step."""
    return plain_text(directory, submit, max_model_len=max_model_len).ids


@torch.inference_mode()
def plain_text(
    directory: Path | str, submit: Submit, *, max_model_len: int = 256, kv_dtype: KVDTypeName = "auto"
) -> PlainText:
    """The same with log-probabilities."""
    model = solo_model(directory, torch.float64)
    params, prompt = submit.params, submit.prompt_ids
    config = engine_config(directory, kv_dtype=kv_dtype)
    cache = PagedCache(
        model.config,
        num_sequences=1,
        max_len=max_model_len,
        dtype=config.torch_kv_dtype,
        scales=kv_scales(config, model.config),
    )
    text = PlainText()
    pending, computed = list(prompt), 0
    while len(text.ids) < params.max_tokens and len(prompt) + len(text.ids) < max_model_len:
        batch = cache.batch([Rows(0, pending, computed)])
        hidden_TH = model.forward(batch, cache.caches).hidden_UH
        logits_TV = whole_logits(model, model.logits(hidden_TH))
        logprobs_TV = logits_TV.log_softmax(-1)
        if computed == 0:
            text.prompt_logprobs = [logprobs_TV[i, token].item() for i, token in enumerate(prompt[1:])]
        text.ids.append(_choose(logits_TV[-1], submit, text.ids))
        text.logprobs.append(logprobs_TV[-1, text.ids[-1]].item())
        computed += len(pending)
        pending = [text.ids[-1]]
        if text.ids[-1] in params.stop_token_ids and len(text.ids) > params.min_tokens:
            break
    return text


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
