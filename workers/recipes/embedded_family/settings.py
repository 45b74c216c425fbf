"""Every size and seed of the family, in one place, and the config.json dictionaries they imply.

The target copies the 31B's structure (spec section 0): five sliding layers to one full, a wider head and fewer
KV heads on the full layers, keys reused as values there, proportional RoPE, layer_scalar, soft-cap 30, tied head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SEED = 20260401
VOCAB = 4096
STOP_IDS = (1, 106, 50)
MASK_ID, BOS_ID = 4, 2


@dataclass(frozen=True)
class TargetSizes:
    """The target decoder; names follow Gemma4TextConfig."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    num_global_key_value_heads: int = 2
    head_dim: int = 32
    global_head_dim: int = 64
    sliding_window: int = 128
    max_position_embeddings: int = 2048
    final_logit_softcapping: float = 30.0
    rms_norm_eps: float = 1e-6

    def layer_types(self) -> list[str]:
        """S,S,S,S,S,F repeated."""
        return ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(self.num_hidden_layers)]


@dataclass(frozen=True)
class AssistantSizes:
    """The MTP assistant (spec section 4): Q-only layers over the target's donor KV."""

    hidden_size: int = 256
    intermediate_size: int = 512
    layer_types: tuple[str, ...] = ("sliding_attention",) * 3 + ("full_attention",)
    num_centroids: int = 128
    centroid_intermediate_top_k: int = 16


@dataclass(frozen=True)
class DFlashSizes:
    """The block drafter (spec section 5)."""

    intermediate_size: int = 1024
    layer_types: tuple[str, ...] = ("sliding_attention", "sliding_attention", "full_attention")
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    sliding_window: int = 256
    rope_theta: float = 1_000_000.0
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = (1, 4, 6, 9, 11)


@dataclass(frozen=True)
class Family:
    """All sizes together; `tiny()` shrinks time, never shapes, for a CPU check of the stages."""

    target: TargetSizes = field(default_factory=TargetSizes)
    assistant: AssistantSizes = field(default_factory=AssistantSizes)
    dflash: DFlashSizes = field(default_factory=DFlashSizes)


FAMILY = Family()

_ROPE: dict[str, Any] = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
}


def target_config(sizes: TargetSizes = FAMILY.target) -> dict[str, Any]:
    """config.json of gemray-tiny, a text-only Gemma4ForCausalLM."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": BOS_ID,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": [1, 106],
        "final_logit_softcapping": sizes.final_logit_softcapping,
        "global_head_dim": sizes.global_head_dim,
        "head_dim": sizes.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": sizes.hidden_size,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": sizes.intermediate_size,
        "layer_types": sizes.layer_types(),
        "max_position_embeddings": sizes.max_position_embeddings,
        "moe_intermediate_size": None,
        "num_attention_heads": sizes.num_attention_heads,
        "num_experts": None,
        "num_global_key_value_heads": sizes.num_global_key_value_heads,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_key_value_heads": sizes.num_key_value_heads,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_parameters": _ROPE,
        "sliding_window": sizes.sliding_window,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
    }


def assistant_config(ordered: bool, family: Family = FAMILY) -> dict[str, Any]:
    """config.json of the assistant; `ordered` adds the centroid head (spec section 4.5)."""
    text = target_config(family.target) | {
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "hidden_size": family.assistant.hidden_size,
        "intermediate_size": family.assistant.intermediate_size,
        "layer_types": list(family.assistant.layer_types),
        "num_hidden_layers": len(family.assistant.layer_types),
        "num_kv_shared_layers": len(family.assistant.layer_types),
        "vocab_size_per_layer_input": 0,
    }
    del text["architectures"]
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": family.target.hidden_size,
        "use_ordered_embeddings": ordered,
        "num_centroids": family.assistant.num_centroids,
        "centroid_intermediate_top_k": family.assistant.centroid_intermediate_top_k,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "text_config": text,
    }


def dflash_config(family: Family = FAMILY) -> dict[str, Any]:
    """config.json of the block drafter, key for key as the published 31B one."""
    sizes, target = family.dflash, family.target
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": sizes.block_size,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": list(sizes.target_layer_ids)},
        "dtype": "bfloat16",
        "final_logit_softcapping": target.final_logit_softcapping,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "layer_types": list(sizes.layer_types),
        "max_position_embeddings": target.max_position_embeddings,
        "num_attention_heads": sizes.num_attention_heads,
        "num_hidden_layers": len(sizes.layer_types),
        "num_key_value_heads": sizes.num_key_value_heads,
        "num_target_layers": target.num_hidden_layers,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": sizes.rope_theta,
        "sliding_window": sizes.sliding_window,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "vocab_size": VOCAB,
    }


def generation_config() -> dict[str, Any]:
    """Gemma's published defaults; the three stop ids of spec section 3."""
    return {
        "bos_token_id": BOS_ID,
        "pad_token_id": 0,
        "eos_token_id": list(STOP_IDS),
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }
