"""A config.json that states every field itself, as `hf_config.plain` has it, without transformers' config classes.

Those give defaults to what a file leaves out, and refuse what cannot be. Importing them takes 3 s of CPU time, most of
it for torch's compiler, which they come with. Published checkpoints leave nothing out; where a file does, or says
something unusual, the classes are asked, so that defaults and refusals are theirs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gemray_workers.checkpoint.hf_config import (
    LAYER_FIELDS,
    ROOT_FIELDS,
    TEXT_FIELDS,
    HFConfigs,
    PlainConfig,
    fingerprint,
)

_TEXT_TYPES = {
    "gemma4": "gemma4_text",
    "gemma4_text": "gemma4_text",
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "gemma4_unified_text": "gemma4_unified_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
"""By a root's model_type, that of its text decoder, which may be the root itself."""
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
_OF_TARGETS = ("model_type", "tie_word_embeddings")
"""Fields of a target's root whose types are checked, beside its stop ids."""
_LAYER_TYPES = ("sliding_attention", "full_attention")
_INTEGER, _NUMBER, _SWITCH = (int,), (float,), (bool,)
_INTEGER_OR_NULL = (int, type(None))
_TYPES: dict[str, tuple[type, ...]] = {
    "attention_bias": _SWITCH,
    "attention_k_eq_v": _SWITCH,
    "backbone_hidden_size": _INTEGER,
    "centroid_intermediate_top_k": _INTEGER,
    "enable_moe_block": _SWITCH,
    "final_logit_softcapping": (float, type(None)),
    "global_head_dim": _INTEGER,
    "head_dim": _INTEGER,
    "hidden_activation": (str,),
    "hidden_size": _INTEGER,
    "hidden_size_per_layer_input": _INTEGER,
    "intermediate_size": _INTEGER,
    "max_position_embeddings": _INTEGER,
    "model_type": (str,),
    "moe_intermediate_size": _INTEGER_OR_NULL,
    "num_attention_heads": _INTEGER,
    "num_centroids": _INTEGER,
    "num_experts": _INTEGER_OR_NULL,
    "num_global_key_value_heads": _INTEGER_OR_NULL,
    "num_hidden_layers": _INTEGER,
    "num_key_value_heads": _INTEGER,
    "num_kv_shared_layers": _INTEGER,
    "rms_norm_eps": _NUMBER,
    "sliding_window": _INTEGER,
    "tie_word_embeddings": _SWITCH,
    "top_k_experts": _INTEGER_OR_NULL,
    "use_double_wide_mlp": _SWITCH,
    "use_ordered_embeddings": _SWITCH,
    "vocab_size": _INTEGER,
    "vocab_size_per_layer_input": _INTEGER,
}
"""What a JSON value of the field is: true is no integer, 1 no number with a fraction."""
_ROPE_TYPES: dict[str, dict[str, tuple[type, ...]]] = {
    "sliding_attention": {"rope_type": (str,), "rope_theta": _NUMBER},
    "full_attention": {"rope_type": (str,), "rope_theta": _NUMBER, "partial_rotary_factor": _NUMBER},
}
_CHANGED_BY_CLASSES = {"per_layer_config", "rope_scaling", "rope_theta"}
"""Fields from which the classes make others."""


def reading(content: Mapping[str, Any], known: HFConfigs, of_class: Callable[[], PlainConfig]) -> PlainConfig:
    """The reading of a config.json: the known one, what the file states itself, or what a class makes of it. It is
    known from then on.
    """
    key = fingerprint(content)
    if key not in known:
        known[key] = complete(content) or of_class()
    return known[key]  # type: ignore[no-any-return]


def complete(content: Mapping[str, Any]) -> PlainConfig | None:
    """The reading of a target's or an assistant's config.json; None where it takes a class of transformers."""
    if (text_type := _TEXT_TYPES.get(str(content.get("model_type")))) is None:
        return None
    text = content if content["model_type"] == text_type else content.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") != text_type or not _is_plain_text(text):
        return None
    fields = _root_fields(content, text)
    if fields is None:
        return None
    return PlainConfig(
        **{name: content[name] for name in fields},
        text=PlainConfig(
            **{name: text[name] for name in TEXT_FIELDS},
            per_layer_config=[PlainConfig(**_own(text, layer_type)) for layer_type in text["layer_types"]],
        ),
    )


def _root_fields(content: Mapping[str, Any], text: Mapping[str, Any]) -> list[str] | None:
    """Names of the fields that are read of the root; None where it leaves one out or has one of another kind."""
    is_assistant = content["model_type"] in _ASSISTANTS
    typed = [name for name in ROOT_FIELDS if name in (_TYPES if is_assistant else _OF_TARGETS)]
    stops = [name for name in ("eos_token_id",) if name in content or not is_assistant]
    is_plain = (
        _states(content, typed)
        and all(_is_ids(content.get(name)) for name in stops)
        and not _CHANGED_BY_CLASSES & content.keys()
        and (not is_assistant or _is_assistants(text))
    )
    return [*typed, *stops] if is_plain else None


def _states(fields: Mapping[str, Any], names: list[str]) -> bool:
    return all(name in fields and type(fields[name]) in _TYPES[name] for name in names)


def _is_plain_text(text: Mapping[str, Any]) -> bool:
    """Whether a text decoder's object says all, and nothing that a class would change or refuse."""
    typed = [name for name in TEXT_FIELDS if name in _TYPES]
    typed += [*LAYER_FIELDS, "global_head_dim", "num_global_key_value_heads"]
    layer_types = text.get("layer_types")
    return (
        _states(text, typed)
        and not _CHANGED_BY_CLASSES & text.keys()
        and _is_ids(text.get("eos_token_id"))
        and type(text.get("tie_word_embeddings", True)) is bool  # not read here, but refused by classes
        and text.get("use_bidirectional_attention", "") in (None, "vision")
        and _is_rope(text.get("rope_parameters"))
        and isinstance(layer_types, list)
        and len(layer_types) == text["num_hidden_layers"] > 0
        and all(layer_type in _LAYER_TYPES for layer_type in layer_types)
        and layer_types[-1] == "full_attention"
    )


def _is_ids(value: Any) -> bool:
    return type(value) is int or (isinstance(value, list) and all(type(each) is int for each in value))


def _is_rope(parameters: Any) -> bool:
    """Whether they are those of both types of layers, each with the fields that it has in published files."""
    if not isinstance(parameters, Mapping) or parameters.keys() != _ROPE_TYPES.keys():
        return False
    return all(
        isinstance(parameters[layer_type], Mapping)
        and parameters[layer_type].keys() == types.keys()
        and all(type(parameters[layer_type][name]) in allowed for name, allowed in types.items())
        for layer_type, types in _ROPE_TYPES.items()
    )


def _is_assistants(text: Mapping[str, Any]) -> bool:
    """What the classes of assistants insist on: plain layers that own no keys."""
    return (
        text["num_kv_shared_layers"] == text["num_hidden_layers"]
        and not text["hidden_size_per_layer_input"]
        and not text["vocab_size_per_layer_input"]
        and not text["enable_moe_block"]
        and not text["use_double_wide_mlp"]
    )


def _own(text: Mapping[str, Any], layer_type: str) -> dict[str, int]:
    """A layer's own fields."""
    if layer_type == "sliding_attention":
        return {name: text[name] for name in LAYER_FIELDS}
    of_full = text["num_global_key_value_heads"] if text["attention_k_eq_v"] else None
    return {
        "head_dim": text["global_head_dim"],
        "num_key_value_heads": text["num_key_value_heads"] if of_full is None else of_full,
    }
