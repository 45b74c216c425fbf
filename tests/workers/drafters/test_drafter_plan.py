"""Which drafter a directory gives, and which are refused: by name, with both sides' values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gemray_workers.drafters.plan import plan_drafter
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import CheckpointError, InvalidField
from gemray_workers.model.config import ModelConfig
from support.checkpoints.tiny import SHAPES, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import edited_drafter, tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config

TARGET = tiny_checkpoint("31B")
MODEL = ModelConfig.from_directory(TARGET)


def plan(path: Path | None, **settings: Any) -> Any:
    config = engine_config(TARGET, drafter_path=None if path is None else str(path), **settings)
    return plan_drafter(config, MODEL)


def rope(*, sliding: float = 1e4, full: float = 1e6, factor: float = 0.25) -> dict[str, Any]:
    """The published RoPE parameters, or others."""
    return {
        "sliding_attention": {"rope_theta": sliding, "rope_type": "default"},
        "full_attention": {"rope_theta": full, "rope_type": "proportional", "partial_rotary_factor": factor},
    }


@pytest.mark.parametrize(
    ("path", "settings", "method", "kv", "most"),
    [
        (None, {}, "none", "none", 0),
        (tiny_assistant(TARGET), {}, "mtp", "shared", 4),
        (tiny_assistant(TARGET), {"method": "mtp", "num_draft_tokens": 7}, "mtp", "shared", 7),
        (tiny_assistant(TARGET), {"method": "none"}, "none", "none", 0),
        (tiny_dflash(TARGET), {}, "dflash", "own", 7),
        (tiny_dflash(TARGET), {"method": "dflash", "num_draft_tokens": 0}, "dflash", "own", 0),
        (tiny_dflash(TARGET), {"drafter_placement": "dedicated"}, "dflash", "own", 7),
    ],
)
def test_the_config_decides(path: Path | None, settings: Any, method: str, kv: str, most: int) -> None:
    traits = plan(path, **settings).traits
    assert (traits.method, traits.kv, traits.num_draft_tokens) == (method, kv, most)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": 80}, r"drafter backbone_hidden_size = 80 .* 64, the target's hidden_size"),
        ({"vocab_size": 300}, r"drafter vocab_size = 300 .* 259, the target's vocab_size"),
        ({"sliding_window": 9}, r"drafter sliding_window = 9 .* 8, the target's"),
        ({"head_dim": 32}, r"head_dim of sliding layers = 32 .* 16, the target's head_dim in layer \d"),
        ({"global_head_dim": 64}, r"head_dim of full layers = 64 .* 32, the target's head_dim in layer \d"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads = 2 .* 4, the target's KV heads in layer \d"),
        ({"num_global_key_value_heads": 4}, r"num_global_key_value_heads = 4 .* 2, the target's KV heads in layer 5"),
        ({"rope_parameters": rope(sliding=5e3)}, r"rope_parameters of sliding .*theta=5000\.0.*theta=10000\.0"),
        ({"rope_parameters": rope(full=1e4)}, r"rope_parameters of full .*theta=10000\.0.*theta=1000000\.0"),
        ({"rope_parameters": rope(factor=0.5)}, r"rope_parameters of full .*factor=0\.5.*factor=0\.25"),
        ({"use_ordered_embeddings": True, "num_centroids": 0}, r"num_centroids = 0 .* a divisor of vocab_size"),
        ({"num_attention_heads": 2, "num_key_value_heads": 1}, "num_attention_heads = 2 .* multiple of the target's 4"),
    ],
)
def test_an_assistant_of_another_target_is_refused(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        plan(edited_drafter(tiny_assistant(TARGET), tmp_path / "d", **changes))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", [tiny_assistant, tiny_dflash])
def test_drafters_of_every_shape_fit_it(shape: Shape, drafter: Any) -> None:
    target = tiny_checkpoint(shape)
    config = engine_config(target, drafter_path=str(drafter(target)))
    plan_drafter(config, ModelConfig.from_directory(target))


@pytest.mark.parametrize("name", ["gemray-tiny-assistant", "gemray-tiny-assistant-centroid", "gemray-tiny-dflash"])
def test_the_embedded_drafters_fit_their_target(name: str) -> None:
    target = embedded_path("gemray-tiny")
    plan_drafter(engine_config(target, drafter_path=str(embedded_path(name))), ModelConfig.from_directory(target))


def test_full_layers_may_state_kv_heads_without_shared_keys(tmp_path: Path) -> None:
    """The target's count stands in num_global_key_value_heads whatever attention_k_eq_v says (spec 11)."""
    plan(edited_drafter(tiny_assistant(TARGET), tmp_path / "d", attention_k_eq_v=False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 80}, "drafter hidden_size = 80 .* 64, the target's hidden_size"),
        ({"vocab_size": 300}, "drafter vocab_size = 300 .* 259"),
        ({"num_target_layers": 60}, r"drafter num_target_layers = 60 .* \d+, the target's num_hidden_layers"),
        ({"target_layer_ids": [1, 57]}, r"target_layer_ids = \[1, 57\] .* 0 to"),
        ({"target_layer_ids": [3, 1]}, "target_layer_ids"),
        ({"mask_token_id": 259}, "mask_token_id = 259 .* 0 to 258"),
        ({"block_size": 1}, "block_size = 1"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"architectures": ["LlamaForCausalLM"], "dflash_config": None}, "an MTP assistant .* or a DFlash drafter"),
    ],
)
def test_another_block_drafter_is_refused(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        plan(edited_drafter(tiny_dflash(TARGET), tmp_path / "d", **changes))


def test_the_method_must_fit_the_directory() -> None:
    with pytest.raises(InvalidField, match=r"auto or mtp: .* holds a mtp drafter"):
        plan(tiny_assistant(TARGET), method="dflash")
    with pytest.raises(InvalidField, match="method = 'dflash' is not allowed: auto or none, as there is no drafter"):
        plan(None, method="dflash")


def test_more_drafts_than_the_drafter_makes_are_refused() -> None:
    with pytest.raises(InvalidField, match=r"num_draft_tokens = 8 .* 0 to 7"):
        plan(tiny_dflash(TARGET), num_draft_tokens=8)


def test_a_target_is_no_drafter() -> None:
    with pytest.raises(InvalidField, match="model_type gemma4"):
        plan(TARGET)


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        plan(tmp_path)


def tokenizer(words: list[str]) -> str:
    return json.dumps({"model": {"vocab": {word: i for i, word in enumerate(words)}}, "added_tokens": []})


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    shutil.copytree(TARGET, target)
    shutil.copytree(tiny_assistant(TARGET), drafter)
    (target / "tokenizer.json").write_text(tokenizer(["a", "b", "c"]))
    config = engine_config(target, drafter_path=str(drafter))
    plan_drafter(config, MODEL)  # the drafter ships none: the target's
    (drafter / "tokenizer.json").write_text(tokenizer(["a", "b", "c"]) + "\n")
    plan_drafter(config, MODEL)
    (drafter / "tokenizer.json").write_text(tokenizer(["a", "x", "c", "d"]))
    with pytest.raises(InvalidField, match=r"4 ids, id 1 is 'x'.* the target's 3 ids, where id 1 is 'b'"):
        plan_drafter(config, MODEL)
    (drafter / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        plan_drafter(config, MODEL)
