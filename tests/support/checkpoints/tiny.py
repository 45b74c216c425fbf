"""Tiny random Gemma 4 checkpoints on disk, one for each published shape, written through transformers' classes.

They keep what makes the shapes differ (KV sharing, per-layer embeddings, k_eq_v, experts, head counts and head dims of
the two layer types) and shrink the rest. Norm weights and layer scalars are random, never ones, so that a test notices
when one is left out. Weights are scaled so that greedy text varies, and so that float32 rounding grows little: in a
network of larger gains, sums in another order already move the logits by 1e-3.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gemray_workers.config import DTypeName

Shape = Literal["E2B", "E4B", "12B", "26B-A4B", "31B"]
Layout = Literal["causal", "conditional"]

SHAPES: tuple[Shape, ...] = ("E2B", "E4B", "12B", "26B-A4B", "31B")
WINDOW = 8
HIDDEN_SIZE = 64
VOCAB_SIZE = 259
"""Prime to every TP size, and not a multiple of the vocabulary padding."""

_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "head_dim": 16,
    "global_head_dim": 32,
    "intermediate_size": 96,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_PER_SHAPE: dict[Shape, dict[str, Any]] = {
    "E2B": {
        "num_hidden_layers": 10,
        "sliding_per_full": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 8,
        "use_double_wide_mlp": True,
    },
    "E4B": {
        "num_hidden_layers": 9,
        "sliding_per_full": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 5,
        "hidden_size_per_layer_input": 8,
    },
    "12B": {
        "num_hidden_layers": 6,
        "sliding_per_full": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "26B-A4B": {
        "num_hidden_layers": 6,
        "sliding_per_full": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "31B": {
        "num_hidden_layers": 6,
        "sliding_per_full": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
}


@functools.cache
def tiny_checkpoint(
    shape: Shape,
    *,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    dtype: DTypeName = "float32",
    max_position: int = 4096,
    layout: Layout = "conditional",
    max_shard_size: str = "1GB",
    eos_token_ids: tuple[int, ...] = (1, 106),
    generation_eos_token_ids: tuple[int, ...] | None = (1, 106, 50),
    num_added: int = 0,
    dead_weights: bool = False,
) -> Path:
    """The directory of a checkpoint, the same one whenever the arguments are the same. Do not change its files.

    Args:
        shape: which published model it mimics.
        seed: of the weights.
        vocab_size: ids, added ones included.
        dtype: of the tensors on disk.
        max_position: max_position_embeddings.
        layout: ``conditional`` as published, or ``causal``, a text-only export.
        max_shard_size: e.g. ``100KB`` for several safetensors files and an index.
        eos_token_ids: of config.json.
        generation_eos_token_ids: of generation_config.json; None writes no such file.
        num_added: config.json states this many fewer ids than the embedding has rows.
        dead_weights: also write the tensors that a loader is to pass over: vision ones and, on KV-shared layers,
            key and value projections.
    """
    directory = Path(tempfile.mkdtemp(prefix=f"tiny-{shape}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    model = _build(shape, layout, vocab_size, max_position)
    _randomize(model, seed)
    model.to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if dead_weights:
        _add_dead_weights(directory, model)
    _edit_config(directory, list(eos_token_ids), num_added)
    _write_generation_config(directory, generation_eos_token_ids)
    return directory


def _build(shape: Shape, layout: Layout, vocab_size: int, max_position: int) -> Any:
    import transformers

    fields = {**_COMMON, **_PER_SHAPE[shape]}
    period = fields.pop("sliding_per_full") + 1
    fields["layer_types"] = [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(fields["num_hidden_layers"])
    ]
    fields |= {"vocab_size": vocab_size, "max_position_embeddings": max_position}
    if shape == "12B":
        text = transformers.Gemma4UnifiedTextConfig(**fields)
        if layout == "causal":
            return transformers.Gemma4UnifiedForCausalLM(text)
        return transformers.Gemma4UnifiedForConditionalGeneration(transformers.Gemma4UnifiedConfig(text_config=text))
    with_inputs = transformers.Gemma4TextConfig(**fields, vocab_size_per_layer_input=vocab_size)
    if layout == "causal":
        return transformers.Gemma4ForCausalLM(with_inputs)
    return transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(text_config=with_inputs))


@torch.no_grad()
def _randomize(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    persistent = model.state_dict()
    tensors = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in persistent)]
    for name, tensor in sorted(tensors):
        tensor.copy_(_random_like(name, tensor, generator))


def _random_like(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:  # noqa: PLR0911 - one rule a family
    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(tensor.shape, generator=generator) * (high - low) + low

    def normal(std: float) -> Tensor:
        return torch.randn(tensor.shape, generator=generator) * std

    if name.endswith("layer_scalar"):
        return uniform(0.8, 1.1)
    if name.endswith(("model.norm.weight", "language_model.norm.weight")):
        # Random signs turn the output away from the tied embedding of the last token, which greedy text would repeat.
        return uniform(0.5, 1.5) * normal(1.0).sign()
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return uniform(0.3, 0.8)
    if "post_" in name and "norm" in name:
        return uniform(0.3, 0.9)
    if "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
        return uniform(0.5, 1.5)
    if "embed_tokens" in name:
        return normal(0.2)
    if name.endswith("per_layer_input_gate.weight"):
        return normal(0.1 / math.sqrt(tensor.shape[-1]))  # reads the stream itself, which no norm has bounded
    if name.endswith("router.proj.weight"):
        return normal(2.0)
    return normal(1 / math.sqrt(tensor.shape[-1]))


def _add_dead_weights(directory: Path, model: Any) -> None:
    text = model.config.get_text_config()
    prefix = "model." if text is model.config else "model.language_model."
    file = directory / "model.safetensors"
    tensors = load_file(file)
    dead = {} if text is model.config else {"model.embed_vision.embedding_projection.weight": torch.ones(4, 4)}
    for layer in range(text.num_hidden_layers - text.num_kv_shared_layers, text.num_hidden_layers):
        for part, shape in (("k_proj", (16, HIDDEN_SIZE)), ("v_proj", (16, HIDDEN_SIZE)), ("k_norm", (16,))):
            dead[f"{prefix}layers.{layer}.self_attn.{part}.weight"] = torch.ones(shape)
    save_file({**tensors, **dead}, file, metadata={"format": "pt"})


def _edit_config(directory: Path, eos_token_ids: list[int], num_added: int) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["eos_token_id"] = eos_token_ids
    text = config.get("text_config", config)
    text["vocab_size"] -= num_added
    file.write_text(json.dumps(config, indent=1))


def _write_generation_config(directory: Path, eos_token_ids: tuple[int, ...] | None) -> None:
    file = directory / "generation_config.json"
    if eos_token_ids is None:
        file.unlink(missing_ok=True)
        return
    settings = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": list(eos_token_ids), "do_sample": True}
    file.write_text(json.dumps({**settings, "temperature": 1.0, "top_k": 64, "top_p": 0.95}, indent=1))
