"""Tiny random drafters on disk for the tiny targets: MTP assistants (dense and centroid head) and DFlash."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gemray_workers.model.config import LayerKind, ModelConfig

ASSISTANT_HIDDEN = 32
DFLASH_WINDOW = 12


class _Random:
    """Seeded tensors: matrices scaled by their inputs, norms around one."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, out: int, inputs: int, gain: float = 1.0) -> Tensor:
        return torch.randn(out, inputs, generator=self._generator) * gain / inputs**0.5

    def norm(self, width: int, low: float = 0.5, high: float = 1.5) -> Tensor:
        return low + (high - low) * torch.rand(width, generator=self._generator)


def _write(prefix: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@functools.cache
def tiny_assistant(target: Path, *, centroids: bool = False, seed: int = 0) -> Path:
    """An MTP assistant of the target in `target`: three sliding layers and a full one, as published."""
    model = ModelConfig.from_directory(target)
    donors = {kind: model.layers[owners[-1]] for kind, owners in model.kv_owners.items()}
    kinds: list[LayerKind] = ["sliding", "sliding", "sliding", "full"]
    heads, intermediate, width = 4, 48, ASSISTANT_HIDDEN
    random = _Random(seed)
    tensors = {
        "pre_projection.weight": random.matrix(width, 2 * model.hidden_size),
        "post_projection.weight": random.matrix(model.hidden_size, width, gain=0.5),
        "model.embed_tokens.weight": random.matrix(model.vocab_size, width, gain=width**0.5),
        "model.norm.weight": random.norm(width),
    }
    for index, kind in enumerate(kinds):
        head_dim = donors[kind].head_dim
        layer = f"model.layers.{index}."
        tensors |= {
            layer + "self_attn.q_proj.weight": random.matrix(heads * head_dim, width),
            layer + "self_attn.q_norm.weight": random.norm(head_dim, 0.2, 0.5),
            layer + "self_attn.o_proj.weight": random.matrix(width, heads * head_dim),
            layer + "mlp.gate_proj.weight": random.matrix(intermediate, width),
            layer + "mlp.up_proj.weight": random.matrix(intermediate, width),
            layer + "mlp.down_proj.weight": random.matrix(width, intermediate),
            layer + "layer_scalar": random.norm(1),
        }
        for norm in ("input", "pre_feedforward"):
            tensors[layer + norm + "_layernorm.weight"] = random.norm(width)
        for norm in ("post_attention", "post_feedforward"):  # branches below one: float32 rounding grows little
            tensors[layer + norm + "_layernorm.weight"] = random.norm(width, 0.3, 0.9)
    if centroids:
        num_centroids = _divisor(model.vocab_size)
        tensors["masked_embedding.centroids.weight"] = random.matrix(num_centroids, width)
        tensors["masked_embedding.token_ordering"] = torch.randperm(
            model.vocab_size, generator=torch.Generator().manual_seed(seed + 1)
        )
    return _write("tiny-assistant-", _assistant_config(model, kinds, heads, intermediate, centroids), tensors)


def _divisor(vocab_size: int) -> int:
    """A number of clusters between 4 and 64 that divides the vocabulary."""
    return next(n for n in range(37, 3, -1) if vocab_size % n == 0)


def _assistant_config(
    model: ModelConfig, kinds: list[LayerKind], heads: int, intermediate: int, centroids: bool
) -> dict[str, Any]:
    sliding, full = (model.layers[model.kv_owners[kind][-1]] for kind in ("sliding", "full"))
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": model.hidden_size,
        "use_ordered_embeddings": centroids,
        "num_centroids": _divisor(model.vocab_size) if centroids else 1,
        "centroid_intermediate_top_k": 3 if centroids else 1,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text",
            "attention_k_eq_v": any(layer.k_eq_v for layer in model.layers),
            "final_logit_softcapping": None,
            "head_dim": sliding.head_dim,
            "global_head_dim": full.head_dim,
            "hidden_size": ASSISTANT_HIDDEN,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "intermediate_size": intermediate,
            "layer_types": [f"{kind}_attention" for kind in kinds],
            "max_position_embeddings": model.max_position_embeddings,
            "num_attention_heads": heads,
            "num_hidden_layers": len(kinds),
            "num_key_value_heads": sliding.num_kv_heads,
            "num_global_key_value_heads": full.num_kv_heads,
            "num_kv_shared_layers": len(kinds),
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": model.sliding_window,
            "vocab_size": model.vocab_size,
        },
    }


@functools.cache
def tiny_dflash(target: Path, *, block_size: int = 8, seed: int = 0, prefix: str = "") -> Path:
    """A DFlash drafter of the target in `target`: two sliding layers and a full one."""
    model = ModelConfig.from_directory(target)
    hidden, heads, kv_heads, head_dim, intermediate = model.hidden_size, 8, 4, 16, 48
    kinds = ["sliding", "sliding", "full"]
    layer_ids = sorted({1, model.num_layers // 2, model.num_layers - 2})
    random = _Random(seed)
    tensors = {
        "fc.weight": random.matrix(hidden, len(layer_ids) * hidden),
        "hidden_norm.weight": random.norm(hidden),
        "norm.weight": random.norm(hidden),
    }
    for index in range(len(kinds)):
        layer = f"layers.{index}."
        tensors |= {
            layer + "input_layernorm.weight": random.norm(hidden),
            layer + "post_attention_layernorm.weight": random.norm(hidden),
            layer + "self_attn.q_proj.weight": random.matrix(heads * head_dim, hidden),
            layer + "self_attn.k_proj.weight": random.matrix(kv_heads * head_dim, hidden),
            layer + "self_attn.v_proj.weight": random.matrix(kv_heads * head_dim, hidden),
            layer + "self_attn.o_proj.weight": random.matrix(hidden, heads * head_dim),
            layer + "self_attn.q_norm.weight": random.norm(head_dim),
            layer + "self_attn.k_norm.weight": random.norm(head_dim),
            layer + "mlp.gate_proj.weight": random.matrix(intermediate, hidden),
            layer + "mlp.up_proj.weight": random.matrix(intermediate, hidden),
            layer + "mlp.down_proj.weight": random.matrix(hidden, intermediate),
        }
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": layer_ids},
        "final_logit_softcapping": 30.0,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "num_attention_heads": heads,
        "num_hidden_layers": len(kinds),
        "num_key_value_heads": kv_heads,
        "num_target_layers": model.num_layers,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": DFLASH_WINDOW,
        "vocab_size": model.vocab_size,
    }
    return _write("tiny-dflash-", config, {prefix + name: tensor for name, tensor in tensors.items()})


def edited_drafter(source: Path, destination: Path, **changes: Any) -> Path:
    """A copy of a drafter with other values in its config; keys of text_config go there, None removes."""
    shutil.copytree(source, destination)
    config = json.loads((destination / "config.json").read_text())
    for key, value in changes.items():
        holders = [config, config.get("text_config", {}), config.get("dflash_config", {})]
        holder = next((h for h in holders if key in h), config)
        holder.pop(key, None)
        if value is not None:
            holder[key] = value
    (destination / "config.json").write_text(json.dumps(config))
    return destination
