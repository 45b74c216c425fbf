"""An MTP assistant's config, checked against the target that it is to draft for (spec 0.2 and 4.8)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemray_workers.checkpoint.complete_config import reading
from gemray_workers.checkpoint.drafter_marks import MTP_MODEL_TYPES
from gemray_workers.checkpoint.hf_config import HFConfigs, PlainConfig, plain
from gemray_workers.checkpoint.json_file import read_json_object
from gemray_workers.checkpoint.quantized.read import read_recipe
from gemray_workers.checkpoint.vocabulary import stored_vocabulary
from gemray_workers.errors import CheckpointError, InvalidField
from gemray_workers.model.config import ModelConfig, layer_config, refuse_other_variants

EMBEDDING = "model.embed_tokens"
EMBEDDING_WEIGHT = f"{EMBEDDING}.weight"


@dataclass(frozen=True, kw_only=True)
class CentroidConfig:
    """The ordered-embeddings head: only the tokens of the best clusters are scored (spec 4.5)."""

    num_centroids: int
    top_k: int
    """Clusters that are scored."""


@dataclass(frozen=True, kw_only=True)
class AssistantConfig:
    """What the drafter computes. Its decoder layers are described like a target's, each with a donor."""

    decoder: ModelConfig
    backbone_hidden_size: int
    """Hidden size of the target."""
    centroids: CentroidConfig | None
    """None: a dense head."""

    @classmethod
    def from_directory(
        cls, path: str | os.PathLike[str], target: ModelConfig, known: HFConfigs | None = None
    ) -> AssistantConfig:
        """Read an assistant's config.json and tie its layers to the target's donor layers. What is in `known` is not
        read again, what is not is added to it.

        Raises:
            CheckpointError: the directory holds no readable config.
            InvalidField: not an MTP assistant, or one of another target; both sides' values are named.
        """
        directory = Path(path)
        quantization = read_recipe(directory, prefix="")  # transformers tells of none that is no object in riddles
        root = _load_hf_config(directory, {} if known is None else known)
        text = root.get_text_config()
        refuse_other_variants(text)
        _check_against(root, text, target)
        vocabulary = stored_vocabulary(directory, EMBEDDING_WEIGHT, tied=root.tie_word_embeddings)
        decoder = replace(
            _decoder(root, text, target, has_own_head=vocabulary.has_own_head),
            quantization=quantization,
        )
        _check_donors(decoder, _stated_global_kv_heads(directory), target)
        return cls(
            decoder=decoder,
            backbone_hidden_size=root.backbone_hidden_size,
            centroids=_centroids(root, text),
        )


def _load_hf_config(directory: Path, known: HFConfigs) -> Any:
    found = reading(read_json_object(directory / "config.json"), known, lambda: _completed(directory))
    _check_model_type(found.model_type)
    return found


def _completed(directory: Path) -> PlainConfig:
    """With the defaults of transformers, which takes seconds to import."""
    from transformers import AutoConfig

    try:
        root = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # strict config classes raise errors of several libraries
        raise CheckpointError(f"{directory} holds no valid MTP assistant config: {error}") from error
    _check_model_type(root.model_type)
    return plain(root)


def _check_model_type(model_type: str) -> None:
    if model_type not in MTP_MODEL_TYPES:
        raise InvalidField("drafter model_type", model_type, "one of " + ", ".join(MTP_MODEL_TYPES))


def _decoder(root: Any, text: Any, target: ModelConfig, *, has_own_head: bool) -> ModelConfig:
    donors = {f"{kind}_attention": owners[-1] for kind, owners in target.kv_owners.items() if owners}
    return ModelConfig(
        model_type=root.model_type,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_added=target.num_added,
        num_attention_heads=text.num_attention_heads,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=text.rms_norm_eps,
        final_logit_softcapping=text.final_logit_softcapping,
        sliding_window=text.sliding_window,
        has_own_head=has_own_head,
        weight_prefix="",
        layers=tuple(layer_config(text, index, donors) for index in range(text.num_hidden_layers)),
        moe=None,
        per_layer_embedding=None,
        eos_token_ids=(),
    )


def _centroids(root: Any, text: Any) -> CentroidConfig | None:
    if not root.use_ordered_embeddings:
        return None
    if root.num_centroids < 1 or text.vocab_size % root.num_centroids:
        raise InvalidField("num_centroids", root.num_centroids, f"a divisor of vocab_size = {text.vocab_size}")
    if not 1 <= root.centroid_intermediate_top_k <= root.num_centroids:
        raise InvalidField(
            "centroid_intermediate_top_k",
            root.centroid_intermediate_top_k,
            f"1 to num_centroids = {root.num_centroids}",
        )
    return CentroidConfig(num_centroids=root.num_centroids, top_k=root.centroid_intermediate_top_k)


def _check_against(root: Any, text: Any, target: ModelConfig) -> None:
    """An assistant of another target drafts noise, or reads KV of another shape."""

    def same(field: str, drafter: object, of_target: object, name: str) -> None:
        if drafter != of_target:
            raise InvalidField(f"drafter {field}", drafter, f"{of_target}, the target's {name}")

    same("backbone_hidden_size", root.backbone_hidden_size, target.hidden_size, "hidden_size")
    same("vocab_size", text.vocab_size, target.vocab_size, "vocab_size")
    same("sliding_window", text.sliding_window, target.sliding_window, "sliding_window")
    for index, layer_type in enumerate(text.layer_types):
        kind = layer_type.removesuffix("_attention")
        owners = target.kv_owners.get(kind, ())
        if not owners:
            raise InvalidField("drafter layer_types", layer_type, "a type of which the target has a layer that owns KV")
        donor = target.layers[owners[-1]]
        own = text.per_layer_config[index]
        same(f"head_dim of {kind} layers", own.head_dim, donor.head_dim, f"head_dim in layer {donor.index}")
        if text.num_attention_heads % donor.num_kv_heads:
            raise InvalidField(
                "drafter num_attention_heads",
                text.num_attention_heads,
                f"a multiple of the target's {donor.num_kv_heads} KV heads in layer {donor.index}",
            )


def _stated_global_kv_heads(directory: Path) -> object:
    """num_global_key_value_heads as written: the config class drops it where attention_k_eq_v is false."""
    text = read_json_object(directory / "config.json").get("text_config")
    return text.get("num_global_key_value_heads") if isinstance(text, dict) else None


def _check_donors(decoder: ModelConfig, stated_global_kv_heads: object, target: ModelConfig) -> None:
    """The keys that a layer reads were split into heads and rotated by its donor, so both must agree on how."""
    for layer in decoder.layers:
        if layer.kv_donor is None:
            raise InvalidField("drafter num_kv_shared_layers", layer.index, "all layers: each reads the target's KV")
        donor = target.layers[layer.kv_donor]
        field, stated = "num_key_value_heads", layer.num_kv_heads
        if layer.kind == "full" and isinstance(stated_global_kv_heads, int):
            field, stated = "num_global_key_value_heads", stated_global_kv_heads
        if donor.num_kv_heads not in (stated, layer.num_kv_heads):
            raise InvalidField(
                f"drafter {field}",
                stated,
                f"{donor.num_kv_heads}, the target's KV heads in layer {donor.index}",
            )
        if layer.rope != donor.rope:
            raise InvalidField(
                f"drafter rope_parameters of {layer.kind} layers",
                layer.rope,
                f"{donor.rope}, the target's in layer {donor.index}",
            )
