"""A complete Gemma 4 directory made on the spot, to serve: a small 31B, random weights, a trained tokenizer.

What it says means nothing; everything around it (sharding, serving, streaming, stops) is real.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from support.checkpoints.tiny_tokenizer import write_tiny_tokenizer

LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2

# The keys are those of the published config.json files, not those that one release of transformers would write.
CONFIG: dict[str, Any] = {
    "vocab_size": 2048,
    "vocab_size_per_layer_input": 2048,
    "hidden_size": 128,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 256,
    "num_hidden_layers": len(LAYER_TYPES),
    "layer_types": LAYER_TYPES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "attention_k_eq_v": True,
    "attention_bias": False,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "num_kv_shared_layers": 0,
    "sliding_window": 64,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "dtype": "float32",
}

GENERATION_CONFIG = {
    "bos_token_id": 2,
    "pad_token_id": 0,
    "eos_token_id": [1, 106, 50],
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 64,
    "top_p": 0.95,
}


def write_servable_checkpoint(directory: str | Path, *, seed: int = 0) -> Path:
    """Write a complete Hugging Face directory (5 MB, float32, under a second) and return it."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Gemma4ForCausalLM(Gemma4TextConfig(**CONFIG))
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_tiny_tokenizer(path, vocab_size=CONFIG["vocab_size"])
    _write_json(path / "config.json", {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **CONFIG})
    _write_json(path / "generation_config.json", GENERATION_CONFIG)
    return path


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
