"""What quantization configs say of which layers, and the formats that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.utils.match import match_targets
from hypothesis import given, settings
from hypothesis import strategies as st

from gemray_workers.checkpoint.quantized.read import MODELOPT_FILE, read_recipe
from gemray_workers.checkpoint.quantized.recipe import Recipe
from gemray_workers.errors import InvalidField
from support.hypothesis_settings import FIXTURE_SERVES_ALL

PREFIX = "model.language_model."
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FP4_OF_32 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}


OVERLAPPING = (
    "Linear",
    "re:.*self_attn.*",
    "re:.*layers.0.*",
    "re:.*q_proj$",
    "re:model.*_proj",
    f"{PREFIX}layers.0.self_attn.q_proj",
)


def recipe(directory: Path, own: dict[str, Any] | None, modelopt: dict[str, Any] | None = None) -> Recipe | None:
    config = {"model_type": "gemma4"} if own is None else {"model_type": "gemma4", "quantization_config": own}
    (directory / "config.json").write_text(json.dumps(config))
    if modelopt is not None:
        (directory / MODELOPT_FILE).write_text(json.dumps(modelopt))
    return read_recipe(directory, prefix=PREFIX)


def titles(found: Recipe | None, *names: str) -> list[str | None]:
    assert found is not None
    forms = [found.format_of(name) for name in names]
    return [None if form is None else form.title for form in forms]


def of_groups(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {f"group_{number}": group for number, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": named, **more}


def test_a_plain_checkpoint_has_no_recipe(tmp_path: Path) -> None:
    assert recipe(tmp_path, None) is None


def test_all_linear_layers_but_the_ignored(tmp_path: Path) -> None:
    ignore = ["lm_head", f"{PREFIX}layers.1.mlp.up_proj", "re:.*router.*", "language_model.model.layers.2.mlp.up_proj"]
    found = recipe(tmp_path, of_groups({"targets": ["Linear"], "weights": INT4}, ignore=ignore))
    names = [f"layers.{n}.mlp.up_proj" for n in range(3)] + ["layers.0.router.proj", "layers.0.experts.3.up_proj"]
    assert titles(found, *names) == ["int4 group 32", None, None, None, "int4 group 32"]


def test_a_config_may_lie_in_the_text_config(tmp_path: Path) -> None:
    own = of_groups({"targets": ["Linear"], "weights": INT4})
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": own}}))
    assert titles(read_recipe(tmp_path, prefix=PREFIX), "layers.0.mlp.up_proj") == ["int4 group 32"]


def test_the_most_specific_target_decides(tmp_path: Path) -> None:
    found = recipe(
        tmp_path,
        of_groups(
            {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
            {"targets": ["re:.*self_attn.*"], "weights": FP8, "format": "float-quantized"},
            {"targets": [f"{PREFIX}layers.1.self_attn.q_proj"], "weights": {**INT4, "group_size": 128}},
            format="mixed-precision",
        ),
    )
    names = ("layers.0.mlp.up_proj", "layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj")
    assert titles(found, *names) == ["int4 group 32", "fp8 per channel", "int4 group 128"]


@settings(max_examples=60, suppress_health_check=FIXTURE_SERVES_ALL)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(OVERLAPPING), min_size=1, max_size=3, unique=True),
            st.sampled_from([INT4, FP8, {**INT4, "group_size": 64}, {**INT4, "group_size": 128}]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_overlapping_targets_mean_what_the_library_takes_them_for(
    tmp_path: Path, groups: list[tuple[list[str], dict[str, Any]]]
) -> None:
    by_target = {target: weights for targets, weights in groups for target in targets}
    own = of_groups(*({"targets": targets, "weights": weights} for targets, weights in groups), format=None)
    for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"):
        matched = match_targets(PREFIX + name, torch.nn.Linear(1, 1), by_target)
        meant = [by_target[target] for target in matched[:1]]
        spelt: list[str | None] = [
            "fp8 per channel" if form is FP8 else f"int4 group {form['group_size']}" for form in meant
        ]
        assert titles(recipe(tmp_path, own), name) == (spelt or [None])


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    quantization = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": ["lm_head", f"{PREFIX}layers.0.self_attn*"],
    }
    found = recipe(tmp_path, None, {"producer": {"name": "modelopt"}, "quantization": quantization})
    assert found is not None
    assert found.activations == ("4-bit float",)
    names = ("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.0.mlp.up_proj")
    assert titles(found, *names) == [None, "nvfp4 (modelopt)", "nvfp4 (modelopt)"]


def test_modelopt_mixes_algorithms_by_layer(tmp_path: Path) -> None:
    layers = {
        f"{PREFIX}layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        f"{PREFIX}layers.0.experts": {"quant_algo": "FP8"},
    }
    own = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    found = recipe(tmp_path, own)
    names = ("layers.0.mlp.up_proj", "layers.0.experts.7.down_proj", "layers.0.mlp.down_proj")
    assert titles(found, *names) == ["nvfp4 (modelopt)", "fp8 per tensor", None]


def test_an_8_bit_kv_cache_alone_leaves_weights_plain(tmp_path: Path) -> None:
    own = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert titles(recipe(tmp_path, own), "layers.0.mlp.up_proj") == [None]


def test_config_json_comes_before_modelopts_file(tmp_path: Path) -> None:
    own = of_groups({"targets": ["Linear"], "weights": INT4})
    found = recipe(tmp_path, own, {"quantization": {"quant_algo": "FP8"}})
    assert titles(found, "layers.0.mlp.up_proj") == ["int4 group 32"]


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"quant_method": "awq", "bits": 4, "zero_point": True}, "awq"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "gptq"),
        ({"quant_method": "bitsandbytes", "quant_type": "nf4"}, "nf4"),
        ({"quant_method": "gguf"}, "gguf"),
        (of_groups({"targets": ["Linear"], "weights": INT4}, ignore=["re:("]), "re:("),
        ({"quant_method": ["awq"]}, "quant_method"),
        ("int4", "quantization_config"),
        (of_groups({"targets": ["Linear"], "weights": {**INT4, "symmetric": False}}), "zero points"),
        (of_groups({"targets": ["Linear"], "weights": {**INT4, "actorder": "group"}}), "weight_g_idx"),
        (of_groups({"targets": ["Linear"], "weights": INT4}, sparsity_config={"format": "sparse-24"}), "sparse"),
        (of_groups({"targets": ["Linear"], "weights": INT4}, transform_config={"u": {}}), "transform"),
        (of_groups({"targets": ["Linear"], "weights": INT4}, format="marlin-24"), "marlin-24"),
        (of_groups({"targets": ["Linear"], "weights": {**INT4, "num_bits": 3}}), "3 bits int"),
        (of_groups({"targets": ["Linear"], "weights": {**INT4, "group_size": 0}}), "group_size"),
        (of_groups({"targets": ["Linear"], "weights": FP4_OF_32}, format=None), "group_size"),
        (of_groups({"targets": ["Embedding"], "weights": INT4}), "Embedding"),
        (of_groups({"targets": ["Linear"], "weights": {**FP8, "strategy": "block"}}, format=None), "block"),
        (of_groups(), "config_groups"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "W4A16_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size"),
        ({"quant_method": "modelopt"}, "quant_algo"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_with_what_is_accepted(tmp_path: Path, own: Any, told: str) -> None:
    with pytest.raises(InvalidField) as raised:
        recipe(tmp_path, own)
    assert told in str(raised.value)
    assert raised.value.allowed


@pytest.mark.parametrize("content", [{}, {"producer": {"name": "modelopt"}}, {"quantization": {}}])
def test_a_file_of_modelopts_that_says_nothing_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=r"one of NVFP4, .*, MIXED_PRECISION, or null for plain weights") as raised:
        recipe(tmp_path, None, content)
    assert raised.value.field == f"quantization_config quant_algo in {tmp_path / MODELOPT_FILE}"
    assert titles(recipe(tmp_path, None, {"quantization": {"quant_algo": None}}), "layers.0.mlp.up_proj") == [None]


def test_a_refusal_of_another_method_names_what_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="pack-quantized int4") as raised:
        recipe(tmp_path, {"quant_method": "awq"})
    assert raised.value.field == f"quantization_config quant_method in {tmp_path}/config.json"  # model or drafter?
    assert "modelopt NVFP4" in raised.value.allowed
