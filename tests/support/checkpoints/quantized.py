"""Checkpoints quantized by the libraries that publish them, and their weights as those libraries decompress them."""

from __future__ import annotations

import atexit
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor

FormatName = Literal[
    "int4-g32",
    "int4-g128",
    "int4-channel",
    "int8-channel",
    "int8-plain",
    "nvfp4",
    "fp8-channel",
    "fp8-tensor",
    "fp8-block",
    "modelopt-nvfp4",
    "modelopt-fp8",
    "modelopt-fp8-block",
]
Tensors = dict[str, Tensor]

_LAYER = re.compile(
    r"(layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.\w+_proj|router\.proj|per_layer_input_gate)"
    r"|(^|\.)(per_layer_model_projection|fc|pre_projection|post_projection|masked_embedding\.centroids))\.weight$"
)
"""Linear layers of targets and of drafters; experts are another thing. Tiny models have too few inputs (8) for groups
in ``per_layer_projection``."""
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj$")
_IGNORED = ["lm_head", "re:.*per_layer_projection$", "re:.*(vision|audio).*"]
_EXCLUDED = ["lm_head", "*per_layer_projection", "model.vision_tower*", "model.audio_tower*", "model.embed_vision*"]


@dataclass(frozen=True)
class LibraryFormat:
    """One format by the library that defines it."""

    compress: Callable[[Tensor], Tensors]
    """A weight's tensors on disk, by the end of their names."""
    decompress: Callable[[Tensors], Tensor]
    """The numbers that they stand for, in float32."""
    config: Mapping[str, Any]
    """A group of a compressed-tensors config, or the fields of a modelopt one."""
    method: Literal["compressed-tensors", "modelopt"] = "compressed-tensors"


def quantized_checkpoint(
    source: Path,
    format_of: Callable[[str], FormatName | None],
    *,
    layout: Literal["each", "stacked"] = "each",
) -> tuple[Path, Path]:
    """A checkpoint with some layers quantized, and its twin with the numbers that these stand for, in float32.

    Args:
        source: the checkpoint.
        format_of: the format of a layer, by full name; None keeps it plain. All are of one library.
        layout: how experts lie on disk.
    """
    packed, plain = _copy_of(source), _copy_of(source)
    found = load_file(source / "model.safetensors")
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}
    stored: Tensors = {}
    meant = dict(tensors)
    used: dict[str, FormatName] = {}
    unused: list[str] = []

    def quantize(name: str, weight_OI: Tensor) -> Tensor:
        format_name = format_of(name)
        if format_name is None:
            unused.append(name)
            stored[f"{name}.weight"] = weight_OI
            return weight_OI
        used[name] = format_name
        form = library_format(format_name)
        fields = form.compress(weight_OI)
        stored.update({f"{name}.{field}": tensor.contiguous() for field, tensor in fields.items()})
        return form.decompress(fields)

    for name, tensor in tensors.items():
        if _LAYER.search(name):
            meant[name] = quantize(name.removesuffix(".weight"), tensor)
        elif (experts := _EXPERTS.match(name)) is not None:
            meant[name] = _quantize_experts(experts[1], experts[2], tensor, quantize)
            if layout == "stacked":
                _stack(stored, experts[1], f"{experts[2]}_proj", len(tensor))
        else:
            stored[name] = tensor
    _save(packed, stored, _config(source, used, unused))
    _save(plain, meant, json.loads((source / "config.json").read_text()))
    return packed, plain


@functools.cache
def every_format_in_turn(source: Path, method: Literal["compressed-tensors", "modelopt"]) -> tuple[Path, Path]:
    """A checkpoint, and its plain twin, whose layers have a library's formats in turn, each kind of layer another one;
    the router and one attention layer in two stay plain, so that stacked layers differ."""
    names = [name for name in _formats() if name != "int4-g128" and library_format(name).method == method]

    def format_of(layer: str) -> FormatName | None:
        number = int(layer.partition("layers.")[2].partition(".")[0] or 0)
        if "router" in layer or (number % 2 == 0 and layer.endswith("v_proj")):
            return None
        kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "experts.", "down_proj", "")
        kind = next(place for place, part in enumerate(kinds) if part in layer)
        return names[(number + kind) % len(names)]

    return quantized_checkpoint(source, format_of)


def _quantize_experts(prefix: str, kind: str, tensor: Tensor, quantize: Callable[[str, Tensor], Tensor]) -> Tensor:
    parts = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}[kind]
    return torch.stack(
        [
            torch.cat([quantize(f"{prefix}.{e}.{n}", w) for n, w in zip(parts, expert.chunk(len(parts)), strict=True)])
            for e, expert in enumerate(tensor)
        ]
    )


def _stack(stored: Tensors, prefix: str, name: str, num_experts: int) -> None:
    """Put the experts' tensors of one layer together, gate above up; both must have one second scale."""
    parts = ["gate_proj", "up_proj"] if name == "gate_up_proj" else [name]
    fields = {key.rsplit(".", 1)[1] for key in stored if key.startswith(f"{prefix}.0.{parts[0]}.")}
    for field in fields:
        each = [[stored.pop(f"{prefix}.{e}.{part}.{field}") for part in parts] for e in range(num_experts)]
        if field == "weight_shape":
            continue
        stored[f"{prefix}.{name}.{field}"] = torch.stack([torch.cat(of_one) for of_one in each])


def _config(source: Path, used: Mapping[str, FormatName], unused: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    names = sorted(set(used.values()))
    forms = {name: library_format(name) for name in names}
    if forms[names[0]].method == "modelopt":
        if len(names) == 1:
            own = {**forms[names[0]].config, "exclude_modules": [*_EXCLUDED, *unused]}
        else:
            layers = {layer: dict(forms[name].config) for layer, name in used.items()}
            own = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": _EXCLUDED}
        return {**config, "quantization_config": {"quant_method": "modelopt", **own}}
    groups = {
        f"group_{number}": {
            **forms[name].config,
            "targets": ["Linear"] if len(names) == 1 else sorted(layer for layer, of in used.items() if of == name),
        }
        for number, name in enumerate(names)
    }
    one = next(iter(groups.values()))["format"] if len(names) == 1 else "mixed-precision"
    own = {
        "quant_method": "compressed-tensors",
        "format": one,
        "config_groups": groups,
        "ignore": [*_IGNORED, *unused],
        "quantization_status": "compressed",
    }
    return {**config, "quantization_config": own}


def _copy_of(source: Path) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="quantized-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    shutil.copytree(source, directory, dirs_exist_ok=True)
    return directory


def _save(directory: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))


def of_compressed_tensors(format_name: str, activations: Mapping[str, Any] | None, **weights: Any) -> LibraryFormat:
    """A format by compressed-tensors' own name and arguments."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(format_name)

    def compress(weight_OI: Tensor) -> Tensors:
        state = {"weight": weight_OI, **_qparams(weight_OI, args)}
        found = {name: t for name, t in compressor.compress(state, scheme).items() if t is not None}
        return {name: t for name, t in found.items() if name != "weight_zero_point"}

    def decompress(found: Tensors) -> Tensor:
        scale = found["weight_scale"].float()
        if "weight_global_scale" in found:  # `decompress` rounds to bfloat16
            rows, words = found["weight_packed"].shape
            values = unpack_fp4_from_uint8(found["weight_packed"], rows, 2 * words, dtype=torch.float32)
            return dequantize(x_q=values, scale=scale, args=args, global_scale=found["weight_global_scale"])
        state = {**found, "weight_scale": scale}
        weight: Tensor = compressor.decompress(state, scheme)["weight"]
        return weight

    group = {"format": format_name, "weights": weights, "input_activations": activations}
    return LibraryFormat(compress, decompress, group)


def _qparams(weight_OI: Tensor, args: QuantizationArgs) -> Tensors:
    """Scales from the largest numbers of what shares one."""
    num_out, num_in = weight_OI.shape
    match args.strategy:
        case "tensor":
            parts = weight_OI.reshape(1, -1)
        case "channel":
            parts = weight_OI.unsqueeze(1)
        case "block":
            assert args.block_structure is not None
            rows, columns = args.block_structure
            padded = torch.nn.functional.pad(weight_OI, (0, -num_in % columns, 0, -num_out % rows))
            blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
            parts = blocks.transpose(1, 2).flatten(2)
        case _:
            parts = weight_OI.unflatten(1, (-1, args.group_size or num_in))
    least, most = parts.amin(-1), parts.amax(-1)
    if args.strategy != "tensor_group":
        return {"weight_scale": calculate_qparams(least, most, args)[0]}
    whole = generate_gparam(weight_OI.min(), weight_OI.max()).reshape(1)
    return {"weight_scale": calculate_qparams(least, most, args, whole)[0], "weight_global_scale": whole}


def _as_modelopt_nvfp4(found: Tensors) -> Tensors:
    """The same bits in modelopt's names; the second scale multiplies there."""
    return {
        "weight": found["weight_packed"],
        "weight_scale": found["weight_scale"],
        "weight_scale_2": 1 / found["weight_global_scale"].squeeze(),
        "input_scale": torch.tensor(0.1),
    }


def _decompress_modelopt_nvfp4(found: Tensors) -> Tensor:
    """As modelopt does; `modelopt_weights` holds its own results."""
    rows, words = found["weight"].shape
    values = unpack_fp4_from_uint8(found["weight"], rows, 2 * words, dtype=torch.float32)
    scale_OG = found["weight_scale"].float() * found["weight_scale_2"]
    return values * scale_OG.repeat_interleave(16, dim=1)


def _modelopt(of: LibraryFormat, algorithm: str, to: Callable[[Tensors], Tensors], meant: Any = None) -> LibraryFormat:
    return LibraryFormat(
        lambda weight_OI: to(of.compress(weight_OI)), meant or of.decompress, {"quant_algo": algorithm}, "modelopt"
    )


_DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_LOCAL = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
_BYTES = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


@functools.cache
def _formats() -> dict[FormatName, LibraryFormat]:
    def integers(bits: int, strategy: str, group_size: int | None = None) -> LibraryFormat:
        return of_compressed_tensors("pack-quantized", None, num_bits=bits, strategy=strategy, group_size=group_size)

    def floats(**how: Any) -> LibraryFormat:
        return of_compressed_tensors("float-quantized", _DYNAMIC, num_bits=8, type="float", **how)

    nvfp4 = of_compressed_tensors(
        "nvfp4-pack-quantized", _LOCAL, num_bits=4, type="float", strategy="tensor_group", group_size=16
    )
    blocks = floats(strategy="block", block_structure=[128, 128])
    return {
        "int4-g32": integers(4, "group", 32),
        "int4-g128": integers(4, "group", 128),
        "int4-channel": integers(4, "channel"),
        "int8-channel": integers(8, "channel"),
        "int8-plain": of_compressed_tensors("int-quantized", _BYTES, num_bits=8, strategy="channel"),
        "nvfp4": nvfp4,
        "fp8-channel": floats(strategy="channel"),
        "fp8-tensor": floats(strategy="tensor"),
        "fp8-block": blocks,
        "modelopt-nvfp4": _modelopt(nvfp4, "NVFP4", _as_modelopt_nvfp4, _decompress_modelopt_nvfp4),
        "modelopt-fp8": _modelopt(
            floats(strategy="tensor"), "FP8", lambda found: {**found, "weight_scale": found["weight_scale"].squeeze()}
        ),
        "modelopt-fp8-block": LibraryFormat(
            lambda w: {k: t[:, None, :, None] if k == "weight_scale" else t for k, t in blocks.compress(w).items()},
            lambda found: blocks.decompress({**found, "weight_scale": found["weight_scale"][:, 0, :, 0]}),
            {"quant_algo": "FP8_PB_WO"},
            "modelopt",
        ),
    }


def library_format(name: FormatName) -> LibraryFormat:
    """A format by its name."""
    return _formats()[name]
