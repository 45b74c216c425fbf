"""What a checkpoint's config.json tells, and what it is refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gemray_workers.errors import CheckpointError, InvalidField
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.kv_groups import check_tensor_parallel, first_kv_head, kv_group_specs
from support.checkpoints.tiny import SHAPES, VOCAB_SIZE, WINDOW, Shape, tiny_checkpoint

# Published shapes (spec 0.1) and KV bytes a token and rank at TP 1, 2, 4, 8 (spec 2.2).
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "E2B": (
        {"num_hidden_layers": 35, "period": 5, "hidden_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 1,
         "intermediate_size": 6144, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
        (18432, 18432, 18432, 18432),
    ),
    "E4B": (
        {"num_hidden_layers": 42, "period": 6, "hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 2,
         "intermediate_size": 10240, "num_kv_shared_layers": 18},
        (57344, 28672, 28672, 28672),
    ),
    "12B": (
        {"num_hidden_layers": 48, "period": 6, "hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8,
         "intermediate_size": 15360, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "hidden_size_per_layer_input": 0},
        (344064, 180224, 98304, 57344),
    ),
    "31B": (
        {"num_hidden_layers": 60, "period": 6, "hidden_size": 5376, "num_attention_heads": 32,
         "num_key_value_heads": 16, "intermediate_size": 21504, "num_global_key_value_heads": 4,
         "attention_k_eq_v": True, "hidden_size_per_layer_input": None},
        (901120, 450560, 225280, 122880),
    ),
}  # fmt: skip


def write_config(directory: Path, text: dict[str, Any], **changes: Any) -> Path:
    period = text.pop("period", 3)
    layers = text.setdefault("num_hidden_layers", 6)
    text.setdefault(
        "layer_types", ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    )
    config = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "eos_token_id": [1, 106]}
    (directory / "config.json").write_text(json.dumps({**config, "text_config": text, **changes}))
    return directory


@pytest.mark.parametrize("name", PUBLISHED)
def test_kv_groups_of_the_published_shapes(name: str, tmp_path: Path) -> None:
    text, bytes_by_tp = PUBLISHED[name]
    model = ModelConfig.from_directory(write_config(tmp_path, dict(text)))
    for tp_size, expected in zip((1, 2, 4, 8), bytes_by_tp, strict=True):
        sliding, full = kv_group_specs(model, tp_size=tp_size, page_size=16, dtype=torch.bfloat16)
        assert sliding.bytes_per_token + full.bytes_per_token == expected
        assert (sliding.name, sliding.head_dim, sliding.window) == ("sliding", 256, model.sliding_window)
        assert (full.name, full.head_dim, full.window) == ("full", 512, None)


def test_donors_and_widths_of_e2b(tmp_path: Path) -> None:
    model = ModelConfig.from_directory(write_config(tmp_path, dict(PUBLISHED["E2B"][0])))
    assert model.kv_owners["sliding"][-1] == 13
    assert model.kv_owners["full"][-1] == 14
    assert {layer.kv_donor for layer in model.layers[15:] if layer.kind == "sliding"} == {13}
    assert {layer.kv_donor for layer in model.layers[15:] if layer.kind == "full"} == {14}
    assert {layer.kv_donor for layer in model.layers[:15]} == {None}
    assert [layer.intermediate_size for layer in model.layers] == [6144] * 15 + [12288] * 20


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_read_from_a_checkpoint(shape: Shape) -> None:
    model = ModelConfig.from_directory(tiny_checkpoint(shape))
    assert model.weight_prefix == "model.language_model."
    assert model.model_type == ("gemma4_unified" if shape == "12B" else "gemma4")
    assert (model.vocab_size, model.num_added, model.hidden_size) == (VOCAB_SIZE, 0, 64)
    assert model.eos_token_ids == (1, 106)
    assert {layer.head_dim for layer in model.layers if layer.kind == "sliding"} == {16}
    assert {layer.head_dim for layer in model.layers if layer.kind == "full"} == {32}
    assert {layer.window for layer in model.layers} == {WINDOW, None}
    assert (model.moe is not None) == (shape == "26B-A4B")
    assert (model.per_layer_embedding is not None) == (shape in ("E2B", "E4B"))
    assert any(layer.k_eq_v for layer in model.layers) == (shape in ("12B", "26B-A4B", "31B"))
    assert not any(layer.k_eq_v for layer in model.layers if layer.kind == "sliding")
    ropes = {layer.kind: layer.rope for layer in model.layers}
    assert (ropes["sliding"].kind, ropes["sliding"].theta) == ("default", 1e4)
    assert (ropes["full"].kind, ropes["full"].theta, ropes["full"].partial_rotary_factor) == ("proportional", 1e6, 0.25)
    assert ModelConfig.from_directory(tiny_checkpoint(shape, layout="causal")).weight_prefix == "model."


def test_replicated_kv_heads_are_those_of_the_ranks_query_heads() -> None:
    num_heads, num_kv_heads = 16, 2
    for size in (1, 2, 4, 8):
        for rank in range(size):
            query_heads = range(rank * num_heads // size, (rank + 1) * num_heads // size)
            needed = {head // (num_heads // num_kv_heads) for head in query_heads}
            assert min(needed) == first_kv_head(num_kv_heads, size, rank)
            assert len(needed) == max(1, num_kv_heads // size)


def test_no_directory_and_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no directory .*nowhere; the model must be"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"no config\.json \(it holds: notes\.txt\)"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable JSON"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("model_type", ["gemma3", "llama", None])
def test_other_models_are_refused_by_name(model_type: str | None, tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=f"model_type = {model_type!r} is not allowed: one of gemma4, "):
        ModelConfig.from_directory(write_config(tmp_path, {}, model_type=model_type))


def test_an_assistant_is_refused_with_the_flag_that_takes_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"model_type gemma4_assistant.* is not allowed: .*--drafter takes it"):
        ModelConfig.from_directory(write_config(tmp_path, {}, model_type="gemma4_assistant"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_bidirectional_attention", "all"),
        ("attention_bias", True),
        ("hidden_activation", "silu"),
        ("layer_types", ["sliding_attention"] * 2 + ["chunked_attention"] * 3 + ["full_attention"]),
        ("num_kv_shared_layers", 6),
        ("num_kv_shared_layers", -1),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", float("nan")),
        ("final_logit_softcapping", 0.0),
        ("quantization_config", ["fp8"]),
        ("sliding_window", 0),
        ("rope_parameters", {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                             "full_attention": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0}}),
        ("num_key_value_heads", 3),
    ],
)  # fmt: skip
def test_variants_that_would_be_computed_wrongly_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises((InvalidField, CheckpointError), match=field):
        ModelConfig.from_directory(write_config(tmp_path, {field: value}))


def test_experts_need_their_sizes(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="num_experts = None"):
        ModelConfig.from_directory(write_config(tmp_path, {"enable_moe_block": True}))
    sizes = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8}
    with pytest.raises(InvalidField, match="top_k_experts = 5 is not allowed: <= num_experts = 4"):
        ModelConfig.from_directory(write_config(tmp_path, sizes))


def test_a_tensor_parallel_size_that_does_not_divide_names_every_dimension() -> None:
    model = ModelConfig.from_directory(tiny_checkpoint("26B-A4B"))
    with pytest.raises(InvalidField) as error:
        check_tensor_parallel(model, 3)
    for part in (
        "tensor_parallel_size = 3",
        "num_attention_heads = 4",
        "moe_intermediate_size = 32",
        "vocab_size padded to 64 = 320",
        "num_key_value_heads of full layers = 2",
        "num_key_value_heads of sliding layers = 4",
    ):
        assert part in str(error.value)
    assert " intermediate_size = 96" not in str(error.value)
    with pytest.raises(InvalidField, match=r"num_attention_heads = 4$"):
        check_tensor_parallel(ModelConfig.from_directory(tiny_checkpoint("12B")), 8)
    with pytest.raises(InvalidField, match="vocab_size_per_layer_input padded to 64 = 320"):
        check_tensor_parallel(ModelConfig.from_directory(tiny_checkpoint("E2B")), 3)
    for tp_size in (1, 2, 4):
        check_tensor_parallel(model, tp_size)
    with pytest.raises(InvalidField, match="an integer >= 1"):
        check_tensor_parallel(model, 0)


def test_added_rows_are_found_on_disk() -> None:
    model = ModelConfig.from_directory(tiny_checkpoint("31B", vocab_size=275, num_added=16, max_shard_size="100KB"))
    assert (model.vocab_size, model.num_added, model.org_vocab_size) == (275, 16, 259)
