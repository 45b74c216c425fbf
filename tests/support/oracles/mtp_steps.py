"""Draft steps of the MTP assistant on a target's KV, to compare with those of transformers."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gemray_workers.checkpoint.loader import load_weights
from gemray_workers.drafters.mtp.assistant import AssistantModel
from gemray_workers.drafters.mtp.config import AssistantConfig
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import SoloCommunicator
from support.checkpoints.tiny import VOCAB_SIZE
from support.oracles.mtp_reference import TargetStates
from support.oracles.oracle import CPU, whole_logits
from support.oracles.paged import PagedCache, Rows

TOLERANCE = 1e-5
"""Bound on the error of states, which are around one, and of logits divided by their standard deviation."""


@functools.cache
def load_assistant(directory: Path, target: TargetModel, *, more_keys: int = 0) -> AssistantModel:
    """The assistant; `more_keys` widens its windows, to compare with an engine of another rule for keys."""
    config = AssistantConfig.from_directory(directory, target.config)
    layers = tuple(
        replace(layer, window=None if layer.window is None else layer.window + more_keys)
        for layer in config.decoder.layers
    )
    config = replace(config, decoder=replace(config.decoder, layers=layers))
    model = AssistantModel(config, target.shard, SoloCommunicator(), dtype=target.dtype, device=CPU)
    load_weights(directory, model.weight_targets(), prefix="", is_ignored=model.ignored_name)
    return model


def engine_steps(
    assistant: AssistantModel,
    target: TargetModel,
    text: list[int],
    tokens: list[int],
    states: TargetStates | None = None,
) -> tuple[Tensor, Tensor]:
    """Whole logits [k, V] and states [k, H] of the draft steps behind `text`, on the KV that the target wrote.

    With `states`, on transformers' KV and hidden state instead, so that the assistants alone are compared.
    """
    cache = PagedCache(target.config, num_sequences=1, max_len=len(text), dtype=target.dtype)
    prefill = cache.batch([Rows(0, text, 0)])
    state_SH = target.forward(prefill, cache.caches).hidden_UH[-1:]
    if states is not None:
        state_SH = states.hidden_CH[len(text) - 1 :][:1]
        for kind, owners in target.config.kv_owners.items():
            k_TND, v_TND = (x[0, :, : len(text)].transpose(0, 1) for x in states.kv[f"{kind}_attention"])
            slots_T = prefill.groups[cache.caches.group_of(owners[-1])].kv_index_T
            cache.caches.writer(owners[-1]).write(k_TND, v_TND, slots_T)
    last_row = cache.batch([Rows(0, text[-1:], len(text) - 1)])
    one_query = replace(last_row, positions_T=last_row.positions_T + 1)
    rope = assistant.angles(one_query.positions_T)
    logits, hidden = [], []
    for token in tokens:
        embedded_SH = target.embedding(torch.tensor([token]))
        logits_SV, state_SH = assistant.step(embedded_SH, state_SH, rope, one_query, cache.caches)
        logits.append(whole_logits(target, logits_SV)[0])
        hidden.append(state_SH[0])
    return torch.stack(logits), torch.stack(hidden)


def random_text(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def assert_equal_steps(
    engine: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], *, centroids: bool, tolerance: float = TOLERANCE
) -> None:
    logits_KV, states_KH = engine
    expected_KV, expected_KH = reference
    assert expected_KH.std() > 0.1, "flat states would agree by themselves"
    torch.testing.assert_close(states_KH, expected_KH, rtol=0, atol=tolerance)
    scored_KV = logits_KV > -torch.inf
    if centroids:
        floor_K1 = expected_KV.amin(-1, keepdim=True)  # transformers' value for tokens that are not scored
        assert torch.equal(scored_KV, expected_KV > floor_K1)
        assert 0 < scored_KV.sum() < scored_KV.numel()
    else:
        assert scored_KV.all()
    spread = expected_KV[scored_KV].std().item()  # about 5, and rounding with it
    torch.testing.assert_close(logits_KV[scored_KV], expected_KV[scored_KV], rtol=0, atol=tolerance * spread)
    assert torch.equal(logits_KV.argmax(-1), expected_KV.argmax(-1))
