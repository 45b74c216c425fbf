"""What the engine needs to know of a Gemma 4 checkpoint's text decoder (spec sections 0.1, 1 and 2.1)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from gemray_workers.checkpoint.complete_config import reading
from gemray_workers.checkpoint.drafter_marks import refuse_drafter
from gemray_workers.checkpoint.hf_config import HFConfigs, PlainConfig, plain
from gemray_workers.checkpoint.hub import name_of_folder
from gemray_workers.checkpoint.json_fields import JsonFields
from gemray_workers.checkpoint.json_file import read_json_object, refuse_broken_link
from gemray_workers.checkpoint.quantized.read import read_recipe
from gemray_workers.checkpoint.quantized.recipe import Recipe
from gemray_workers.checkpoint.vocabulary import StoredVocabulary, stored_vocabulary
from gemray_workers.errors import CheckpointError, InvalidField, Summary

LayerKind = Literal["sliding", "full"]
RopeKind = Literal["default", "proportional"]

# The layouts of a target checkpoint: model_type of config.json -> prefix of the text decoder's tensors.
_WEIGHT_PREFIXES = {
    "gemma4_text": "model.",
    "gemma4_unified_text": "model.",
    "gemma4": "model.language_model.",
    "gemma4_unified": "model.language_model.",
}
_LAYER_KINDS: dict[str, LayerKind] = {"sliding_attention": "sliding", "full_attention": "full"}
_ROPE_KINDS: dict[str, RopeKind] = {"default": "default", "proportional": "proportional"}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one layer type (spec 1.5)."""

    theta: float
    kind: RopeKind
    partial_rotary_factor: float
    """Share of the head dim that rotates; 1 for the default kind."""
    factor: float
    """Divides the frequencies; 1 for the default kind."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer. Head counts are those of the whole model, before any sharding."""

    index: int
    kind: LayerKind
    num_kv_heads: int
    head_dim: int
    window: int | None
    """Keys a query sees, itself included; None on full layers."""
    rope: RopeConfig
    k_eq_v: bool
    """V is the key projection's raw output; the layer has no v_proj."""
    kv_donor: int | None
    """The layer whose KV this one reads; None when it owns its KV."""
    intermediate_size: int
    """Width of the dense MLP."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed experts beside the dense MLP of every layer (spec 1.9)."""

    num_experts: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class PerLayerEmbeddingConfig:
    """A second embedding table that feeds every layer (spec 1.8)."""

    width: int
    """Values a layer and token (P)."""
    vocab_size: int
    """Rows of the table; ids beyond it use row 0."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The text decoder of a Gemma 4 target model."""

    model_type: str
    hidden_size: int
    vocab_size: int
    """Every id that exists, added ones included."""
    num_added: int
    """How many ids at the end of the vocabulary are added ones: rows of embed_tokens beyond the vocab_size
    that config.json states."""
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    final_logit_softcapping: float | None
    sliding_window: int
    has_own_head: bool
    """Whether logits come from a table of their own rather than the embedding's."""
    weight_prefix: str
    """What stands before ``embed_tokens.weight`` and the like on disk."""
    layers: tuple[LayerConfig, ...]
    moe: MoEConfig | None
    per_layer_embedding: PerLayerEmbeddingConfig | None
    quantization: Recipe | None = None
    """Which of its layers are quantized on disk; None where none is."""
    eos_token_ids: tuple[int, ...]
    """From config.json, both levels; generation_config.json and the tokenizer may add more (spec 3)."""

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str], known: HFConfigs | None = None) -> ModelConfig:
        """Read ``config.json`` of a local Hugging Face directory. What is in `known` is not read again, what is not is
        added to it.

        Raises:
            CheckpointError: `path` is no directory or has no readable config.json.
            InvalidField: the config describes something else than a Gemma 4 text decoder, or a variant that
                gemray does not compute.
        """
        root = _load_hf_config(Path(path), {} if known is None else known)
        text = root.get_text_config()
        prefix = _WEIGHT_PREFIXES[root.model_type]
        return cls._from_text_config(
            text,
            model_type=root.model_type,
            weight_prefix=prefix,
            eos_token_ids=_union_of_ids(root.eos_token_id, text.eos_token_id),
            vocabulary=stored_vocabulary(path, prefix + "embed_tokens.weight", tied=root.tie_word_embeddings),
            quantization=read_recipe(path, prefix=prefix),
        )

    @classmethod
    def _from_text_config(
        cls,
        text: Any,
        *,
        model_type: str,
        weight_prefix: str,
        eos_token_ids: tuple[int, ...],
        vocabulary: StoredVocabulary,
        quantization: Recipe | None,
    ) -> ModelConfig:
        refuse_other_variants(text)
        num_added = 0 if vocabulary.rows is None else max(0, vocabulary.rows - text.vocab_size)
        ple_width = getattr(text, "hidden_size_per_layer_input", 0)  # the unified class has no such field
        return cls(
            model_type=model_type,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size + num_added,
            num_added=num_added,
            num_attention_heads=text.num_attention_heads,
            max_position_embeddings=text.max_position_embeddings,
            rms_norm_eps=text.rms_norm_eps,
            final_logit_softcapping=text.final_logit_softcapping,
            sliding_window=text.sliding_window,
            has_own_head=vocabulary.has_own_head,
            weight_prefix=weight_prefix,
            layers=_layers(text),
            moe=_moe(text),
            per_layer_embedding=(
                PerLayerEmbeddingConfig(width=ple_width, vocab_size=text.vocab_size_per_layer_input)
                if ple_width
                else None
            ),
            eos_token_ids=eos_token_ids,
            quantization=quantization,
        )

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def org_vocab_size(self) -> int:
        """Ids that are not added: the first region of `ShardIndices`."""
        return self.vocab_size - self.num_added

    @cached_property
    def kv_owners(self) -> dict[LayerKind, tuple[int, ...]]:
        """Layers that own KV, ascending, by kind. The last of each kind is the donor that KV-shared layers and
        MTP drafters read (spec 2.1)."""
        kinds: tuple[LayerKind, ...] = ("sliding", "full")
        return {
            kind: tuple(layer.index for layer in self.layers if layer.kind == kind and layer.kv_donor is None)
            for kind in kinds
        }


def _load_hf_config(directory: Path, known: HFConfigs) -> Any:
    if not directory.is_dir():
        found = f"{directory} is a file" if directory.is_file() else f"there is no directory {directory}"
        raise CheckpointError(
            f"{found}; the model must be a local Hugging Face directory, or the name of an embedded model"
        )
    refuse_broken_link(directory / "config.json")
    if not (directory / "config.json").is_file():
        raise CheckpointError(_why_no_config(directory))
    content = read_json_object(directory / "config.json")
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in _WEIGHT_PREFIXES:
        refuse_drafter(directory, content)
        raise InvalidField("model_type", model_type, "one of " + ", ".join(sorted(_WEIGHT_PREFIXES)))
    if model_type.endswith("_text") and content.pop("text_config", None) is not None:
        raise InvalidField("text_config", Summary("an object"), f"absent: a {model_type} config is one itself")
    text = content.get("text_config", content)
    if not isinstance(text, dict):
        raise InvalidField("text_config", text, "an object")
    for holder in (content, text):
        if not isinstance(holder.get("quantization_config"), dict | None):
            raise InvalidField("quantization_config", holder["quantization_config"], "an object, or null")
    if text.get("hidden_size_per_layer_input", 0) is None:
        text["hidden_size_per_layer_input"] = 0  # some exports say "off" with null (spec 11)
    if text.get("rope_scaling", 0) is None:
        del text["rope_scaling"]  # the same, and transformers would take rope_parameters for null
    return reading(content, known, lambda: _completed(directory, model_type, content))


def _completed(directory: Path, model_type: str, content: dict[str, Any]) -> PlainConfig:
    """With the defaults of transformers, which takes seconds to import."""
    from transformers import CONFIG_MAPPING

    try:
        return plain(CONFIG_MAPPING[model_type].from_dict(content))
    except Exception as error:  # strict config classes raise errors of several libraries
        raise CheckpointError(f"{directory / 'config.json'} is not a valid {model_type} config: {error}") from error


def _why_no_config(directory: Path) -> str:
    if (repo := name_of_folder(directory)) is not None:
        return f"{directory} is the cache's folder of {repo}, not a model's: it is served by that name"
    if (directory / "adapter_config.json").is_file():
        return f"{directory} holds an adapter (adapter_config.json), not a model: merge it into its model first"
    found = ", ".join(sorted(entry.name for entry in directory.iterdir())[:8]) or "nothing"
    return f"{directory} has no config.json (it holds: {found})"


def refuse_other_variants(text: Any) -> None:
    """Refuse what the decoder here would compute wrongly, rather than serve other numbers."""
    allowed: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("use_bidirectional_attention", (None, "vision")),
        ("attention_bias", (False,)),
        ("hidden_activation", ("gelu_pytorch_tanh",)),
    )
    for name, values in allowed:
        value = getattr(text, name)
        if value not in values:
            raise InvalidField(f"text_config.{name}", value, "one of " + ", ".join(repr(v) for v in values))
    if len(text.layer_types) != text.num_hidden_layers:
        raise InvalidField(
            "text_config.layer_types", text.layer_types, f"{text.num_hidden_layers} entries (num_hidden_layers)"
        )
    for kind in text.layer_types:
        if kind not in _LAYER_KINDS:
            raise InvalidField("text_config.layer_types", kind, "one of " + ", ".join(_LAYER_KINDS))
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "sliding_window"):
        if getattr(text, name) < 1:
            raise InvalidField(f"text_config.{name}", getattr(text, name), "an integer >= 1")
    if not 0 <= text.num_kv_shared_layers <= text.num_hidden_layers:  # an assistant shares all
        allowed_here = f"an integer from 0 to {text.num_hidden_layers}"
        raise InvalidField("text_config.num_kv_shared_layers", text.num_kv_shared_layers, allowed_here)
    if not 0 <= text.rms_norm_eps < math.inf:
        raise InvalidField("text_config.rms_norm_eps", text.rms_norm_eps, "a number >= 0")
    softcap = text.final_logit_softcapping
    if softcap is not None and not 0 < softcap < math.inf:
        raise InvalidField("text_config.final_logit_softcapping", softcap, "a number > 0, or null")


def _layers(text: Any) -> tuple[LayerConfig, ...]:
    first_shared = text.num_hidden_layers - text.num_kv_shared_layers
    donors = {kind: i for i, kind in enumerate(text.layer_types[:first_shared])}  # the last of each kind wins
    if missing := set(text.layer_types[first_shared:]) - donors.keys():
        raise InvalidField(
            "text_config.num_kv_shared_layers",
            text.num_kv_shared_layers,
            "small enough to leave a layer that owns KV of each type that shares (no donor of "
            + ", ".join(sorted(missing))
            + ")",
        )
    return tuple(
        layer_config(text, index, donors if index >= first_shared else {}) for index in range(len(text.layer_types))
    )


def layer_config(text: Any, index: int, donors: Mapping[str, int]) -> LayerConfig:
    """Layer `index` of a Hugging Face text config; `donors` maps a layer type to the layer whose KV it reads."""
    layer_type = text.layer_types[index]
    kind = _LAYER_KINDS[layer_type]
    own = text.per_layer_config[index]
    if text.num_attention_heads % own.num_key_value_heads:
        raise InvalidField(
            f"num_key_value_heads of layer {index}",
            own.num_key_value_heads,
            f"a divisor of num_attention_heads = {text.num_attention_heads}",
        )
    donor = donors.get(layer_type)
    double_wide = text.use_double_wide_mlp and donor is not None
    return LayerConfig(
        index=index,
        kind=kind,
        num_kv_heads=own.num_key_value_heads,
        head_dim=own.head_dim,
        window=text.sliding_window if kind == "sliding" else None,
        rope=_rope(text.rope_parameters, layer_type),
        k_eq_v=bool(text.attention_k_eq_v) and kind == "full",
        kv_donor=donor,
        intermediate_size=text.intermediate_size * (2 if double_wide else 1),
    )


def _rope(parameters: Any, layer_type: str) -> RopeConfig:
    """Rotary settings of one layer type; `parameters` holds an object for each."""
    of_type = parameters.get(layer_type) if isinstance(parameters, dict) else None
    if not isinstance(of_type, dict):
        raise InvalidField(
            "text_config.rope_parameters",
            parameters,
            f"an object with one of rope_type and rope_theta for {layer_type} (as rope_scaling, too)",
        )
    fields = JsonFields(f"text_config.rope_parameters {layer_type}", of_type)
    name = of_type.get("rope_type")
    kind = _ROPE_KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InvalidField("rope_parameters.rope_type", name, "one of " + ", ".join(_ROPE_KINDS))

    def of_proportional(field: str) -> float:
        value = fields.optional_number(field, positive=True) if kind == "proportional" else None
        return 1.0 if value is None else value

    return RopeConfig(
        theta=fields.number("rope_theta", positive=True),
        kind=kind,
        partial_rotary_factor=of_proportional("partial_rotary_factor"),
        factor=of_proportional("factor"),
    )


def _moe(text: Any) -> MoEConfig | None:
    if not getattr(text, "enable_moe_block", False):
        return None
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        value = getattr(text, name)
        if value is None or value < 1:
            raise InvalidField(f"text_config.{name}", value, "an integer >= 1 when enable_moe_block is true")
    if text.top_k_experts > text.num_experts:
        raise InvalidField("text_config.top_k_experts", text.top_k_experts, f"<= num_experts = {text.num_experts}")
    return MoEConfig(
        num_experts=text.num_experts, top_k=text.top_k_experts, intermediate_size=text.moe_intermediate_size
    )


def _union_of_ids(*sources: int | Sequence[int] | None) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in sources:
        if source is not None:
            ids.update([source] if isinstance(source, int) else source)
    return tuple(sorted(ids))
