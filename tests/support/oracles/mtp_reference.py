"""The MTP assistant by transformers, on the KV of transformers' own target: what drafts are compared with.

transformers 5.23 cannot be used as it is: its config refuses a model in which all layers are shared, and targets
without shared layers return no KV for the assistant (spec section 8, row 18). `assistant_support` mends both.

Shape legend: C committed positions, H the target's hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def _kv_sharing_modes(config: Any) -> list[str | None]:
    """Layers that read another's KV reuse; the last owner of each type stores, whoever may read it."""
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    modes: list[str | None] = [None] * first_shared + ["reuse"] * config.num_kv_shared_layers
    for kind in set(config.layer_types[:first_shared]):
        modes[max(i for i in range(first_shared) if config.layer_types[i] == kind)] = "store"
    return modes


@contextmanager
def assistant_support() -> Iterator[None]:
    """transformers, able to build assistants and to hand out the KV of any target."""
    from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

    modes = property(_kv_sharing_modes)
    with (
        patch.object(Gemma4TextConfig, "kv_sharing_modes", modes),
        patch.object(Gemma4UnifiedTextConfig, "kv_sharing_modes", modes),
    ):
        yield


@functools.cache
def hf_target(directory: Path) -> Any:
    """A target in float32 that stores its donor layers' KV; kept for the session."""
    import transformers

    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    with assistant_support():
        return getattr(transformers, architecture).from_pretrained(directory, attn_implementation="eager").eval()


@functools.cache
def hf_assistant(directory: Path) -> Any:
    """An assistant in float32; kept for the session."""
    from transformers import Gemma4AssistantForCausalLM

    with assistant_support():
        return Gemma4AssistantForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


@dataclass(frozen=True)
class TargetStates:
    """What a target computed for a text; row p depends on tokens 0..p alone, so any C can be cut from it."""

    hidden_CH: Tensor
    """After the final norm."""
    layers_LCH: Tensor
    """``hidden_states[i + 1]`` of each block i but the last, which transformers gives after the final norm."""
    kv: dict[str, tuple[Tensor, Tensor]]
    """By layer type, keys and values [1, heads, C, D] of the donor layer."""

    def keys(self, start: int, *, window: int | None) -> dict[str, tuple[Tensor, Tensor]]:
        """The donor KV that a draft behind `start` committed positions may see: all for full layers, and for
        sliding ones the last `window`, or all when None, so that transformers' own mask decides."""
        first = {"full_attention": 0, "sliding_attention": 0 if window is None else max(0, start - window)}
        return {kind: (k[:, :, first[kind] : start], v[:, :, first[kind] : start]) for kind, (k, v) in self.kv.items()}


@torch.no_grad()
def target_states(directory: Path, text: Sequence[int]) -> TargetStates:
    """The target's states over `text`, in one pass."""
    output = hf_target(directory).model(
        input_ids=torch.tensor([list(text)]),
        output_hidden_states=True,
        return_shared_kv_states=True,
        use_cache=False,
    )
    return TargetStates(
        hidden_CH=output.last_hidden_state[0],
        layers_LCH=torch.stack(output.hidden_states[1:])[:, 0],
        kv=dict(output.shared_kv_states),
    )


@torch.no_grad()
def draft_steps(
    target: Path,
    assistant: Path,
    states: TargetStates,
    start: int,
    tokens: Sequence[int],
    *,
    window: int | None,
    position_delta: int = 0,
) -> tuple[Tensor, Tensor]:
    """Logits [k, V] and recurrent states [k, H] of k draft steps behind `start` committed positions.

    Args:
        target: whose embedding is the input.
        assistant: the drafter.
        states: of the target, over at least `start` tokens.
        start: C, where the first of `tokens` stands.
        tokens: the input of each step: the newest token, then drafts.
        window: see `TargetStates.keys`.
        position_delta: 0 for transformers' own position, that of the newest token.
    """
    embedding = hf_target(target).get_input_embeddings()  # scales by sqrt(H) itself
    model = hf_assistant(assistant)
    state_H = states.hidden_CH[start - 1]
    kv = states.keys(start, window=window)
    logits, hidden = [], []
    for token in tokens:
        embedded_H = embedding(torch.tensor([token]))[0]
        output = model(
            inputs_embeds=torch.cat([embedded_H, state_H]).view(1, 1, -1),
            position_ids=torch.tensor([[start + position_delta]]),
            attention_mask=None,
            shared_kv_states=kv,
        )
        state_H = output.last_hidden_state[0, 0]
        logits.append(output.logits[0, 0])
        hidden.append(state_H)
    return torch.stack(logits), torch.stack(hidden)


def scaled_embedding(directory: Path, token: int) -> Tensor:
    """sqrt(H) times the target's row, written out; what `hf_target`'s embedding gives."""
    table_VH = hf_target(directory).get_input_embeddings().weight
    row_H: Tensor = table_VH[token] * math.sqrt(table_VH.shape[1])
    return row_H
