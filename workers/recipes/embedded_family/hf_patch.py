"""Spec section 8, pitfall 18: transformers 5.23 cannot build the assistant, nor hand out a 31B-like target's KV."""

from __future__ import annotations

from typing import Any


def kv_sharing_modes(config: Any) -> list[str | None]:
    """Layers below the first shared one own KV, the last of each type among them stores it, the rest reuse."""
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    modes: list[str | None] = [None if i < first_shared else "reuse" for i in range(config.num_hidden_layers)]
    for kind in set(config.layer_types[:first_shared]):
        modes[max(i for i in range(first_shared) if config.layer_types[i] == kind)] = "store"
    return modes


def apply() -> None:
    """Replace the property where this transformers has it."""
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    if hasattr(Gemma4TextConfig, "kv_sharing_modes"):
        Gemma4TextConfig.kv_sharing_modes = property(kv_sharing_modes)
