"""A DFlash drafter's config, checked against the target that it is to draft for (spec 0.3 and 5)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemray_workers.checkpoint.drafter_marks import DFLASH_ARCHITECTURE
from gemray_workers.checkpoint.json_fields import JsonFields
from gemray_workers.checkpoint.json_file import read_json_object
from gemray_workers.checkpoint.quantized.read import read_recipe
from gemray_workers.checkpoint.quantized.recipe import Recipe
from gemray_workers.config import DFlashCausalName
from gemray_workers.errors import InvalidField
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.model.config import LayerConfig, LayerKind, ModelConfig, RopeConfig
from gemray_workers.model.kv_groups import local_kv_heads


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """What the drafter computes."""

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    """Every layer owns KV: rows of context, injected from the target's features."""
    causal: tuple[bool, ...]
    """For each layer, whether a block row sees only the rows before it (spec 5.4)."""
    rms_norm_eps: float
    block_size: int
    """Rows of a block: the newest token and ``block_size - 1`` masks."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    final_logit_softcapping: float | None
    output_multiplier: float
    input_scale: float | None
    """Multiplies the target's raw embedding of a block's tokens; None is the target's own scale (spec 5.3)."""
    quantization: Recipe | None = None
    """Which of its layers are quantized on disk; None where none is."""

    @property
    def max_draft_tokens(self) -> int:
        """Drafts of a block."""
        return self.block_size - 1

    @classmethod
    def from_directory(
        cls,
        path: str | os.PathLike[str],
        target: ModelConfig,
        *,
        input_scale: float | None = None,
        causal: DFlashCausalName = "config",
    ) -> DFlashConfig:
        """Read the config.json of a drafter of this format (see `served_format`).

        Args:
            path: the drafter's directory.
            target: what it drafts for.
            input_scale: instead of the config's.
            causal: which layers are causal inside a block.

        Raises:
            CheckpointError: no readable config.
            InvalidField: another variant, or one of another target; both sides' values are named.
        """
        raw = read_json_object(Path(path) / "config.json")
        if DFLASH_ARCHITECTURE not in (raw.get("architectures") or []):
            raise InvalidField(
                "drafter architectures", raw.get("architectures"), f"{DFLASH_ARCHITECTURE}, or an MTP assistant"
            )
        own = _fields(raw)
        _refuse_other_variants(own)
        heads = own.integer("num_attention_heads")
        if heads % own.integer("num_key_value_heads"):
            raise own.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
        kinds = _layer_kinds(own)
        of_config = own.optional_boolean("is_causal")
        multiplier = own.optional_number("output_multiplier")
        scale_of_config = own.optional_number("input_embedding_scale")
        return cls(
            hidden_size=_hidden_size(own, target),
            num_attention_heads=heads,
            head_dim=_head_dim(own),
            layers=tuple(_layer(own, index, kind) for index, kind in enumerate(kinds)),
            causal=tuple(_is_causal(causal, of_config, kind) for kind in kinds),
            rms_norm_eps=own.number("rms_norm_eps", positive=True),
            block_size=own.integer("block_size", least=2),
            mask_token_id=own.integer("mask_token_id", least=0, most=target.vocab_size - 1),
            target_layer_ids=_target_layer_ids(own, target),
            final_logit_softcapping=own.optional_number("final_logit_softcapping", positive=True),
            output_multiplier=1.0 if multiplier is None else multiplier,
            input_scale=scale_of_config if input_scale is None else input_scale,
            quantization=read_recipe(path, prefix=""),
        )

    def kv_group_specs(self, *, tp_size: int, page_size: int, dtype: torch.dtype) -> tuple[KVGroupSpec, ...]:
        """The drafter's own KV groups on one rank."""
        for name, size in (
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self._kv_heads),
            ("intermediate_size", self.layers[0].intermediate_size),
        ):
            if size % tp_size:
                raise InvalidField("tensor_parallel_size", tp_size, f"a divisor of the drafter's {name} = {size}")
        kinds: tuple[LayerKind, ...] = ("sliding", "full")
        specs = []
        for kind in kinds:
            layers = [layer for layer in self.layers if layer.kind == kind]
            if layers:
                specs.append(
                    KVGroupSpec(
                        name=f"dflash.{kind}",
                        layers=tuple(layer.index for layer in layers),
                        num_kv_heads=local_kv_heads(self._kv_heads, tp_size),
                        head_dim=self.head_dim,
                        page_size=page_size,
                        window=layers[0].window,
                        dtype=dtype,
                    )
                )
        return tuple(specs)

    @property
    def _kv_heads(self) -> int:
        return self.layers[0].num_kv_heads


def _is_causal(choice: DFlashCausalName, of_config: bool | None, kind: LayerKind) -> bool:
    if choice == "config" and of_config is not None:
        return of_config
    return {"config": kind == "sliding", "sliding": kind == "sliding", "all": True, "none": False}[choice]


def _fields(raw: dict[str, Any]) -> JsonFields:
    """Every field, at whichever of the two levels: some exporters nest keys that others keep on top."""
    nested = raw.get("dflash_config", {})
    if not isinstance(nested, dict):
        raise InvalidField("drafter dflash_config", nested, "an object, or absent")
    return JsonFields("drafter", {**raw, **nested})


def _refuse_other_variants(own: JsonFields) -> None:
    """Refuse what the layers here would compute wrongly, rather than draft noise."""
    own.one_of("hidden_act", "silu", None)
    own.one_of("rope_scaling", None)
    own.one_of("attention_bias", False, None)
    own.optional_object("rope_parameters").one_of("rope_type", "default", None)


def _hidden_size(own: JsonFields, target: ModelConfig) -> int:
    """The target's: a drafter of another target drafts noise.

    The format's class has a default vocabulary that is no Gemma 4 target's, so that vocab_size must be there.
    num_target_layers is not in every published config.
    """
    for field, of_target, name in (
        ("hidden_size", target.hidden_size, "hidden_size"),
        ("vocab_size", target.vocab_size, "vocab_size"),
        ("num_target_layers", target.num_layers, "num_hidden_layers"),
    ):
        if (field != "num_target_layers" or own.has(field)) and own.integer(field) != of_target:
            raise own.refusal(field, f"{of_target}, the target's {name}")
    return target.hidden_size


def _target_layer_ids(own: JsonFields, target: ModelConfig) -> tuple[int, ...]:
    ids = own.integers("target_layer_ids")
    if ids != sorted(set(ids)) or not ids or not 0 <= ids[0] <= ids[-1] < target.num_layers:
        raise own.refusal("target_layer_ids", f"ascending layers of the target, 0 to {target.num_layers - 1}")
    return tuple(ids)


def _head_dim(own: JsonFields) -> int:
    """Rotary embedding turns pairs of it."""
    head_dim = own.integer("head_dim", least=2)
    if head_dim % 2:
        raise own.refusal("head_dim", "an even integer")
    return head_dim


def _layer_kinds(own: JsonFields) -> list[LayerKind]:
    names: dict[str, LayerKind] = {"sliding_attention": "sliding", "full_attention": "full"}
    num_layers = own.integer("num_hidden_layers")
    types = own.names("layer_types") if own.has("layer_types") else ["full_attention"] * num_layers
    if len(types) != num_layers or any(layer_type not in names for layer_type in types):
        raise own.refusal("layer_types", f"num_hidden_layers = {num_layers} of {', '.join(names)}")
    return [names[layer_type] for layer_type in types]


def _layer(own: JsonFields, index: int, kind: LayerKind) -> LayerConfig:
    return LayerConfig(
        index=index,
        kind=kind,
        num_kv_heads=own.integer("num_key_value_heads"),
        head_dim=own.integer("head_dim"),
        window=own.integer("sliding_window") if kind == "sliding" else None,
        rope=RopeConfig(theta=_rope_theta(own), kind="default", partial_rotary_factor=1.0, factor=1.0),
        k_eq_v=False,
        kv_donor=None,
        intermediate_size=own.integer("intermediate_size"),
    )


def _rope_theta(own: JsonFields) -> float:
    nested = own.optional_object("rope_parameters")
    holder = nested if nested.has("rope_theta") and not own.has("rope_theta") else own
    return holder.number("rope_theta", positive=True)
