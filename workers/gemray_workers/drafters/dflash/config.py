"""A DFlash drafter's config, checked against the target that it is to draft for (spec 0.3 and 5)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemray_workers.checkpoint.json_file import read_json_object
from gemray_workers.config import DFlashCausalName
from gemray_workers.errors import InvalidField
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.model.config import LayerConfig, LayerKind, ModelConfig, RopeConfig
from gemray_workers.model.kv_groups import local_kv_heads

ARCHITECTURE = "DFlashDraftModel"


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
        _refuse_other_variants(raw)
        own = {**raw, **raw.get("dflash_config", {})}  # some exporters nest keys that others keep on top
        _check_against(own, target)
        kinds = _layer_kinds(own)
        return cls(
            hidden_size=own["hidden_size"],
            num_attention_heads=own["num_attention_heads"],
            head_dim=own["head_dim"],
            layers=tuple(_layer(own, index, kind) for index, kind in enumerate(kinds)),
            causal=tuple(_is_causal(causal, own.get("is_causal"), kind) for kind in kinds),
            rms_norm_eps=own["rms_norm_eps"],
            block_size=own["block_size"],
            mask_token_id=own["mask_token_id"],
            target_layer_ids=tuple(own["target_layer_ids"]),
            final_logit_softcapping=own.get("final_logit_softcapping"),
            output_multiplier=float(own.get("output_multiplier", 1.0)),
            input_scale=input_scale if input_scale is not None else own.get("input_embedding_scale"),
        )

    def kv_group_specs(self, *, tp_size: int, page_size: int, dtype: torch.dtype) -> tuple[KVGroupSpec, ...]:
        """The drafter's own KV groups on one rank."""
        for name, size in (("num_attention_heads", self.num_attention_heads), ("num_key_value_heads", self._kv_heads)):
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


def _refuse_other_variants(raw: Mapping[str, Any]) -> None:
    keys = {**raw, **raw.get("dflash_config", {})}
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "rms_norm_eps",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
    ):
        if key not in keys:
            raise InvalidField(f"drafter {key}", None, "present in config.json of a DFlash drafter")
    if keys.get("hidden_act", "silu") != "silu":
        raise InvalidField("drafter hidden_act", keys["hidden_act"], "silu")
    if keys.get("rope_scaling") is not None:
        raise InvalidField("drafter rope_scaling", keys["rope_scaling"], "null")
    if keys["block_size"] < 2:
        raise InvalidField("drafter block_size", keys["block_size"], "an integer >= 2")


def _check_against(own: Mapping[str, Any], target: ModelConfig) -> None:
    """A drafter of another target drafts noise."""
    for field, of_target, name in (
        ("hidden_size", target.hidden_size, "hidden_size"),
        ("vocab_size", target.vocab_size, "vocab_size"),
        ("num_target_layers", target.num_layers, "num_hidden_layers"),
    ):
        if field in own and own[field] != of_target:
            raise InvalidField(f"drafter {field}", own[field], f"{of_target}, the target's {name}")
    ids = own["target_layer_ids"]
    if not isinstance(ids, list) or not all(isinstance(index, int) for index in ids):
        raise InvalidField("drafter target_layer_ids", ids, "a list of integers")
    if list(ids) != sorted(set(ids)) or not ids or not 0 <= ids[0] <= ids[-1] < target.num_layers:
        raise InvalidField(
            "drafter target_layer_ids", ids, f"ascending layers of the target, 0 to {target.num_layers - 1}"
        )
    if not 0 <= own["mask_token_id"] < target.vocab_size:
        raise InvalidField("drafter mask_token_id", own["mask_token_id"], f"0 to {target.vocab_size - 1}")


def _layer_kinds(own: Mapping[str, Any]) -> list[LayerKind]:
    names: dict[str, LayerKind] = {"sliding_attention": "sliding", "full_attention": "full"}
    types = own.get("layer_types") or ["full_attention"] * own["num_hidden_layers"]
    if len(types) != own["num_hidden_layers"] or any(layer_type not in names for layer_type in types):
        raise InvalidField(
            "drafter layer_types", types, f"num_hidden_layers = {own['num_hidden_layers']} of {', '.join(names)}"
        )
    return [names[layer_type] for layer_type in types]


def _layer(own: Mapping[str, Any], index: int, kind: LayerKind) -> LayerConfig:
    return LayerConfig(
        index=index,
        kind=kind,
        num_kv_heads=own["num_key_value_heads"],
        head_dim=own["head_dim"],
        window=own["sliding_window"] if kind == "sliding" else None,
        rope=RopeConfig(theta=float(_rope_theta(own)), kind="default", partial_rotary_factor=1.0, factor=1.0),
        k_eq_v=False,
        kv_donor=None,
        intermediate_size=own["intermediate_size"],
    )


def _rope_theta(own: Mapping[str, Any]) -> float:
    nested = own.get("rope_parameters") or {}
    theta = own.get("rope_theta", nested.get("rope_theta"))
    if theta is None:
        raise InvalidField("drafter rope_theta", None, "present in config.json of a DFlash drafter")
    return float(theta)
