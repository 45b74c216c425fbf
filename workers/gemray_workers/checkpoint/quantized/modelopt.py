"""What modelopt writes: ``hf_quant_config.json``, or the same as the ``quantization_config`` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemray_workers.checkpoint.json_fields import JsonFields
from gemray_workers.checkpoint.quantized.compressed_tensors import Groups
from gemray_workers.checkpoint.quantized.formats import ACCEPTED, WeightFormat, fp8, modelopt_nvfp4
from gemray_workers.checkpoint.quantized.recipe import Pattern

_FORMATS: Mapping[str, WeightFormat] = {
    "NVFP4": modelopt_nvfp4("4-bit float"),
    "W4A16_NVFP4": modelopt_nvfp4(None),
    "FP8": fp8(None, None, "8-bit float"),
    "FP8_PER_CHANNEL_PER_TOKEN": fp8(None, 1, "8-bit float"),
    "FP8_PB_WO": fp8(128, 128, None),
}
_EVERY = Pattern("Linear", "class")
_TELLING = frozenset({"quant_algo", "kv_cache_quant_algo", "kv_cache_scheme"})
"""Keys of which a config has one at least: without any it says nothing, not that weights are plain."""


def read_modelopt(content: Mapping[str, Any]) -> Groups:
    """Targets and excluded names of a config, in either of its two forms.

    Raises:
        InvalidField: an algorithm that gemray does not compute, named with what is accepted.
    """
    nested = content.get("quantization")
    own: Mapping[str, Any] = nested if isinstance(nested, Mapping) else content
    fields = JsonFields("quantization_config", own)
    excluded = next((name for name in ("exclude_modules", "ignore") if fields.has(name)), None)
    ignored = () if excluded is None else tuple(Pattern.of_modelopt(text) for text in fields.names(excluded))
    if not _TELLING & (own.keys() | content.keys()):
        raise fields.refusal("quant_algo", f"one of {', '.join(_FORMATS)}, MIXED_PRECISION, or null for plain weights")
    algorithm = own.get("quant_algo")
    if algorithm is None:  # the KV cache alone
        return (), ignored
    if algorithm == "MIXED_PRECISION":
        return _mixed(own, fields), ignored
    return ((_EVERY, _format(fields, own)),), ignored


def _mixed(own: Mapping[str, Any], fields: JsonFields) -> tuple[tuple[Pattern, WeightFormat], ...]:
    layers = own.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise fields.refusal("quantized_layers", "an object of layers' names with an object for each")
    return tuple(
        (_of_layer(name), _format(JsonFields(f"quantization_config quantized_layers {name}", layer), layer))
        for name, layer in layers.items()
    )


def _of_layer(name: str) -> Pattern:
    """A linear layer's own name, or that of a module that holds several."""
    return Pattern(name, "name") if name.endswith(("_proj", ".proj")) else Pattern.of_modelopt(name)


def _format(fields: JsonFields, own: Mapping[str, Any]) -> WeightFormat:
    algorithm = own.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.upper() not in _FORMATS:
        raise fields.refusal("quant_algo", f"one of {', '.join(_FORMATS)}. Accepted are {ACCEPTED}")
    form = _FORMATS[algorithm.upper()]
    if form.group == 16 and own.get("group_size") not in (None, 16):
        raise fields.refusal("group_size", "16, that of NVFP4")
    return form
