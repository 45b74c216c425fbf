"""The ``quantization_config`` that compressed-tensors and llm-compressor write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemray_workers.checkpoint.json_fields import JsonFields
from gemray_workers.checkpoint.quantized.formats import (
    ACCEPTED,
    WeightFormat,
    fp8,
    nvfp4,
    packed_int,
    plain_int8,
)
from gemray_workers.checkpoint.quantized.recipe import Pattern
from gemray_workers.errors import InvalidField, Summary

_OWNER = "quantization_config"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")

Groups = tuple[tuple[tuple[Pattern, WeightFormat], ...], tuple[Pattern, ...]]
"""Targets with their formats, and what is ignored."""


def read_compressed_tensors(content: Mapping[str, Any]) -> Groups:
    """Targets and ignored names of a config.

    Raises:
        InvalidField: a format that gemray does not compute, named with what is accepted.
    """
    fields = JsonFields(_OWNER, content)
    if fields.optional_object("sparsity_config").has("format"):
        sparsity = fields.optional_object("sparsity_config")
        if content["sparsity_config"]["format"] != "dense":
            raise sparsity.refusal("format", f"dense; sparse weights are not read. Accepted are {ACCEPTED}")
    if content.get("transform_config"):
        raise fields.refusal("transform_config", "absent: transformed weights are not computed")
    groups = content.get("config_groups")
    if content.get("kv_cache_scheme") and groups in ({}, None):  # the KV cache alone
        groups = {}
    elif not isinstance(groups, dict) or not groups:
        raise fields.refusal("config_groups", "an object with a group of targets and weights at least")
    targets: list[tuple[Pattern, WeightFormat]] = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise InvalidField(f"{_OWNER} config_groups {name}", group, "an object with targets and weights")
        form = _format(f"{_OWNER} config_groups {name}", group, content.get("format"))
        for target in JsonFields(f"{_OWNER} config_groups {name}", group).names("targets"):
            if target == "Embedding":
                raise InvalidField(f"{_OWNER} config_groups {name} targets", target, "linear layers; tables stay plain")
            if form is not None:
                targets.append((Pattern.of_compressed_tensors(target), form))
    ignored = (
        tuple(Pattern.of_compressed_tensors(text) for text in fields.names("ignore")) if fields.has("ignore") else ()
    )
    return tuple(targets), ignored


def _format(owner: str, group: Mapping[str, Any], usual: object) -> WeightFormat | None:
    """The format of a group's weights; None where only activations are meant."""
    fields = JsonFields(owner, group)
    if not fields.has("weights"):
        return None
    weights = fields.optional_object("weights")
    content: Mapping[str, Any] = group["weights"]
    named = group.get("format") or (None if usual == "mixed-precision" else usual)
    if named is not None and named not in _FORMATS:
        raise InvalidField(f"{owner} format", named, f"one of {', '.join(_FORMATS)}. Accepted are {ACCEPTED}")
    if content.get("symmetric") is False:
        raise weights.refusal("symmetric", f"true: zero points are not computed. Accepted are {ACCEPTED}")
    if content.get("actorder") not in (None, False, "weight", "static"):
        raise weights.refusal("actorder", "null or weight: columns in another order (weight_g_idx) are not computed")
    strategy = content.get("strategy")
    if strategy is None:  # what the library takes it for
        size = content.get("group_size")
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    activations = _activations(group.get("input_activations"))
    by_type = {"int": _of_integers, "float": _of_floats}.get(str(content.get("type", "int")), _of_integers)
    form = by_type(weights, content, strategy, named, activations)
    if form is None:
        bits, kind = content.get("num_bits"), content.get("type", "int")
        found = Summary(f"{bits} bits {kind}, strategy {strategy}, format {named}")
        raise InvalidField(f"{owner} weights", found, f"one of: {ACCEPTED}")
    return form


def _of_integers(
    weights: JsonFields, content: Mapping[str, Any], strategy: str, named: str | None, activations: str | None
) -> WeightFormat | None:
    plain = named in ("int-quantized", "naive-quantized")
    match (content.get("num_bits"), strategy):
        case (4 | 8 as bits, "group" | "channel") if named in (None, "pack-quantized"):
            return packed_int(bits, _group(weights, strategy), activations)
        case (8, "group" | "channel") if plain:
            return plain_int8(_group(weights, strategy), 1, activations)
        case (8, "tensor") if plain:
            return plain_int8(None, None, activations)
    return None


def _of_floats(
    weights: JsonFields, content: Mapping[str, Any], strategy: str, named: str | None, activations: str | None
) -> WeightFormat | None:
    match (content.get("num_bits"), strategy):
        case (8, "tensor") if named != "nvfp4-pack-quantized":
            return fp8(None, None, activations)
        case (8, "channel") if named != "nvfp4-pack-quantized":
            return fp8(None, 1, activations)
        case (8, "block") if named != "nvfp4-pack-quantized":
            rows, columns = _block(weights, content.get("block_structure"))
            return fp8(columns, rows, activations)
        case (4, "tensor_group" | "group") if named in (None, "nvfp4-pack-quantized"):
            if content.get("group_size") != 16:
                raise weights.refusal("group_size", "16, that of NVFP4")
            return nvfp4(activations)
    return None


def _group(weights: JsonFields, strategy: str) -> int | None:
    return None if strategy == "channel" else weights.integer("group_size", least=1)


def _block(weights: JsonFields, value: object) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case _:
            raise weights.refusal("block_structure", "two integers > 0, rows and columns")


def _activations(value: object) -> str | None:
    if not isinstance(value, Mapping) or value.get("num_bits") is None:
        return None
    return f"{value['num_bits']}-bit {value.get('type', 'int')}"
