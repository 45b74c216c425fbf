"""What transformers makes of a config.json, as plain data that one process can hand to another.

Its config classes take 4.5 s of CPU time to import. Published files say all without them (`complete_config`). Where one
does not, the coordinator asks them, and ranks take its reading where their own config.json says the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any

ROOT_FIELDS = (
    "model_type",
    "eos_token_id",
    "tie_word_embeddings",
    "backbone_hidden_size",
    "use_ordered_embeddings",
    "num_centroids",
    "centroid_intermediate_top_k",
)
TEXT_FIELDS = (
    "attention_bias",
    "attention_k_eq_v",
    "enable_moe_block",
    "eos_token_id",
    "final_logit_softcapping",
    "hidden_activation",
    "hidden_size",
    "hidden_size_per_layer_input",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_experts",
    "num_hidden_layers",
    "num_kv_shared_layers",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "top_k_experts",
    "use_bidirectional_attention",
    "use_double_wide_mlp",
    "vocab_size",
    "vocab_size_per_layer_input",
)
LAYER_FIELDS = ("head_dim", "num_key_value_heads")

HFConfigs = MutableMapping[str, Any]
"""Readings by the `fingerprint` of what was read."""


class PlainConfig(SimpleNamespace):
    """The fields of a Hugging Face config that gemray reads, as attributes; absent where the class has none."""

    def get_text_config(self) -> Any:
        """The text decoder's."""
        return self.text


def plain(config: Any) -> PlainConfig:
    """A Hugging Face config of a target or an assistant, defaults filled in and derived fields computed."""
    text = config.get_text_config()
    num_layers = min(text.num_hidden_layers, len(text.layer_types))
    layers = [PlainConfig(**_fields(text.per_layer_config[index], LAYER_FIELDS)) for index in range(num_layers)]
    return PlainConfig(
        **_fields(config, ROOT_FIELDS),
        text=PlainConfig(**_fields(text, TEXT_FIELDS), per_layer_config=layers),
    )


def fingerprint(content: Mapping[str, Any]) -> str:
    """Equal for equal contents of a config.json, in whatever order and spacing."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _fields(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names if hasattr(config, name)}
