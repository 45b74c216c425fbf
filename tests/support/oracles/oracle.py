"""The plainest way to run a checkpoint: one process, no scheduler, every sequence a token a step.

What the engine serves must equal what `plain_generate` says.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from gemray_kernels.numerics import Numerics
from gemray_workers.attention.kernels import attention_kernel
from gemray_workers.checkpoint.loader import load_weights
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.messages import Choice
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from support.oracles.paged import PagedCache, Rows

CPU = torch.device("cpu")


def load_model(
    directory: Path | str, comm: Communicator, dtype: torch.dtype, numerics: Numerics = Numerics.FAST
) -> TargetModel:
    """A rank's model with its weights, read without the checkpoint loader."""
    model = TargetModel(
        ModelConfig.from_directory(directory),
        comm,
        dtype=dtype,
        device=CPU,
        attention=attention_kernel(Choice("attention", "torch", "on a CPU"), numerics),
        numerics=numerics,
    )
    prefix = model.config.weight_prefix
    wanted: dict[str, WeightTarget] = {target.full_name(prefix): target for target in model.weight_targets()}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if model.ignored_name(name):
                    continue
                target, tensor = wanted.pop(name), tensors.get_tensor(name)
                assert tuple(tensor.shape) == target.shape, name
                for copy in target.copies:
                    copy.destination.copy_(tensor[copy.source])
    assert not wanted, sorted(wanted)
    return model


def loaded_model(
    directory: Path | str, comm: Communicator, dtype: torch.dtype, numerics: Numerics = Numerics.FAST
) -> TargetModel:
    """A rank's model with its weights, read by the checkpoint loader: quantized ones, too."""
    config = ModelConfig.from_directory(directory)
    model = TargetModel(
        config,
        comm,
        dtype=dtype,
        device=CPU,
        attention=attention_kernel(Choice("attention", "torch", "on a CPU"), numerics),
        numerics=numerics,
    )
    load_weights(directory, model.weight_targets(), prefix=config.weight_prefix, is_ignored=model.ignored_name)
    return model


@functools.lru_cache(maxsize=16)
def solo_model(
    directory: Path | str, dtype: torch.dtype = torch.float64, numerics: Numerics = Numerics.FAST
) -> TargetModel:
    """The whole model in this process; kept for the session."""
    return load_model(directory, SoloCommunicator(), dtype, numerics)


def whole_logits(model: TargetModel, local_RV: Tensor) -> Tensor:
    """Logits by id [R, vocab_size] of a model on one rank, in which padding columns may stand between ids."""
    ids = model.shard.global_ids()
    columns = ids.argsort(stable=True)[(ids < 0).sum() :]
    return local_RV[:, columns]


def prompt_logits(
    model: TargetModel,
    prompt: Sequence[int],
    chunks: Sequence[int] | None = None,
    *,
    kv_dtype: torch.dtype | None = None,
) -> Tensor:
    """Logits of every prompt row [len(prompt), vocab_size], computed in chunks of the given lengths, over a cache of
    the model's dtype or another."""
    cache = PagedCache(model.config, num_sequences=1, max_len=len(prompt), dtype=kv_dtype or model.dtype)
    logits, start = [], 0
    for length in chunks or [len(prompt)]:
        rows = Rows(0, prompt[start : start + length], start)
        logits.append(model.logits(model.forward(cache.batch([rows]), cache.caches).hidden_UH))
        start += length
    assert start == len(prompt)
    return whole_logits(model, torch.cat(logits))


def greedy_batch(model: TargetModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[Tensor, Tensor]:
    """Greedy continuations [S, num_tokens] and, for each token, the lead of its logit over the second best."""
    cache = PagedCache(
        model.config,
        num_sequences=len(prompts),
        max_len=max(map(len, prompts)) + num_tokens,
        dtype=model.dtype,
    )
    lengths = [0] * len(prompts)
    pending: list[Sequence[int]] = list(prompts)
    ids, leads = [], []
    for _ in range(num_tokens):
        batch = cache.batch([Rows(s, tokens, lengths[s]) for s, tokens in enumerate(pending)])
        hidden_TH = model.forward(batch, cache.caches).hidden_UH
        lengths = batch.kv_len_S.tolist()
        logits_SV = whole_logits(model, model.logits(hidden_TH[batch.query_start_Z[1:].long() - 1]))
        top = logits_SV.topk(2).values
        ids.append(logits_SV.argmax(-1))
        leads.append(top[:, 0] - top[:, 1])
        pending = [[token] for token in ids[-1].tolist()]
    return torch.stack(ids, 1), torch.stack(leads, 1)


def plain_generate(
    directory: Path | str, prompt: Sequence[int], num_tokens: int, dtype: torch.dtype = torch.float64
) -> list[int]:
    """Greedy ids after `prompt`: exactly `num_tokens` of them, stop ids or not."""
    ids, _ = greedy_batch(solo_model(directory, dtype), [prompt], num_tokens)
    found: list[int] = ids[0].tolist()
    return found
