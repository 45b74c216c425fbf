"""`gemray check` refuses what the ranks would refuse, from configs and headers alone."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gemray_cluster.check.fit import check_fit, check_fit_before_ray, check_front_end
from gemray_cluster.check.result import Status
from gemray_cluster.settings.settings import ServeSettings
from support.checkpoints.kv_scales import with_kv_scales
from support.checkpoints.quantized import quantized_checkpoint
from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.quantized_family.measure import keep

TARGET = tiny_checkpoint("31B")


def check(**settings: Any) -> tuple[Status, str]:
    (result,) = check_fit(ServeSettings(**{"model": str(TARGET), "kv_memory": 64 << 20, **settings}), "cpu")
    return result.status, result.sentence


def test_what_fits_says_how_long_requests_may_be() -> None:
    status, sentence = check(tp=2, drafter=(str(tiny_dflash(TARGET)),))
    assert status is Status.OK
    assert "on 2 ranks, drafter dflash: requests of up to 4096 tokens" in sentence


def test_auto_tells_an_estimate() -> None:
    status, sentence = check(kv_memory="auto", tp=2)
    assert status is Status.OK
    told = r"on 2 ranks: requests of up to 4096 tokens fit \d+\.\d GiB of KV memory, an estimate of what auto finds"
    assert re.search(told, sentence)


def test_auto_on_gpus_that_are_elsewhere_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (result,) = check_fit(ServeSettings(model=str(TARGET)), "cuda")
    assert result.status is Status.OK
    assert result.sentence.endswith(
        "requests of up to 4096 tokens, as far as they fit the KV memory that is found at start on the nodes' GPUs."
    )


def test_auto_on_a_card_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of a made-up card is free."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (10 << 30, 80 << 30))
    (result,) = check_fit(ServeSettings(model=str(TARGET)), "cuda")
    assert result.status is Status.OK
    assert " tokens fit 7.3 GiB of KV memory, an estimate" in result.sentence
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (1 << 30, 80 << 30))
    (result,) = check_fit(ServeSettings(model=str(TARGET)), "cuda")
    assert result.status is Status.FAIL
    assert "rank 0 has no memory for KV pages: of 80.00 GiB it can have 1.00 GiB" in result.sentence


def test_two_drafters_are_told() -> None:
    status, sentence = check(drafter=(str(tiny_dflash(TARGET)), str(tiny_assistant(TARGET))))
    assert status is Status.OK
    assert "on 1 ranks, drafters mtp and dflash: requests" in sentence


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp": 3}, "it must divide"),
        (
            {"kv_memory": 1024},
            "kv_memory = 1024 (from the default) is not allowed: a size that holds a request: one sequence of 2 tokens",
        ),
        ({"drafter": (str(tiny_assistant(TARGET)),), "drafter_placement": "dedicated"}, "shares the target's KV cache"),
        ({"drafter": (str(tiny_assistant(tiny_checkpoint("31B", vocab_size=300))),)}, "the target's vocab_size"),
        (
            {"drafter": (str(tiny_dflash(TARGET)),), "draft_tokens": 20},
            "draft_tokens = 20 (from the default) is not allowed",
        ),
        (
            {"drafter": (str(tiny_assistant(TARGET)),) * 2},
            "two of different kinds, an MTP assistant and a DFlash drafter: this is the first one again",
        ),
        (
            {
                "drafter": (str(tiny_assistant(TARGET)), str(tiny_dflash(TARGET))),
                "drafter_placement": "dedicated",
            },
            "colocated, as there are two drafters",
        ),
        (
            {"drafter": (str(tiny_assistant(TARGET)), str(tiny_dflash(TARGET))), "method": "mtp"},
            "auto or none with two drafters",
        ),
        (
            {"drafter": ("/nope",)},
            "drafter = '/nope' (from the default) is not allowed: there is no such directory; a path",
        ),
        (
            {"method": "dflash"},
            "method = 'dflash' (from the default) is not allowed: auto or none, as there is no drafter",
        ),
        ({"draft_tokens": 4}, "0 or auto, as there is no drafter"),
        (
            {"dflash_input_scale": 2.0},
            "dflash_input_scale = 2.0 (from the default) is not allowed: unset, as there is no",
        ),
        (
            {"dflash_causal": "all"},
            "dflash_causal = 'all' (from the default) is not allowed: config, as there is no DF",
        ),
        (
            {"mtp_position_delta": -1},
            "mtp_position_delta = -1 (from the default) is not allowed: 0, as there is no MTP",
        ),
        (
            {"drafter_attention_backend": "torch"},
            "drafter_attention_backend = 'torch' (from the default) is not allowed",
        ),
        (
            {"drafter": (str(tiny_assistant(TARGET)),), "dflash_input_scale": 2.0},
            "unset, as there is no DFlash drafter",
        ),
        (
            {"drafter": (str(tiny_dflash(TARGET)),), "mtp_position_delta": -1},
            "0, as there is no MTP assistant",
        ),
        (
            {"drafter": (str(tiny_dflash(TARGET)),), "method": "none", "dflash_causal": "all"},
            "config, as there is no DFlash drafter",
        ),
        ({"drafter": (str(tiny_dflash(TARGET)),), "dflash_input_scale": 0.0}, "not allowed: a number > 0"),
        ({"max_model_len": 1 << 20}, "max_model_len = 1048576 (from the default) is not allowed: 2 to 4096"),
        ({"attention_backend": "flash"}, "attention_backend = 'flash'"),
        ({"max_num_seqs": 64, "max_step_tokens": 63}, "max_step_tokens = 63 (from the default) is not allowed: >= 64"),
        (
            {"drafter": (str(tiny_dflash(TARGET, block_size=16)),), "max_num_seqs": 64, "max_step_tokens": 512},
            "is not allowed: >= 1024, so that each of max_num_seqs = 64 sequences can decode in every step with all of "
            "its 15 drafts",
        ),
    ],
)
def test_settings_that_do_not_fit(settings: Any, words: str) -> None:
    status, sentence = check(**settings)
    assert status is Status.FAIL
    assert words in sentence


@pytest.mark.parametrize("settings", [{"max_num_seqs": 64}, {"draft_tokens": 15}, {"max_num_seqs": 1024}])
def test_rows_of_a_step_follow_from_what_runs(settings: Any) -> None:
    assert check(drafter=(str(tiny_dflash(TARGET, block_size=16)),), **settings)[0] is Status.OK
    assert check(drafter=(str(tiny_assistant(TARGET)),), **settings)[0] is Status.OK


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TARGET, model)
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["intermediate_size"] *= 2
    (model / "config.json").write_text(json.dumps(config))
    status, sentence = check(model=str(model))
    assert status is Status.FAIL
    assert "mlp.down_proj.weight has shape" in sentence
    assert sentence.count("\n") < 20
    assert check(model=str(model), random_weights=True)[0] is Status.OK


def test_weights_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TARGET, model)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()
    status, sentence = check(model=str(model))
    assert status is Status.FAIL
    assert "model.safetensors" in sentence


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tokenizer.json", "{}", "tokenizer"),
        ("generation_config.json", '{"temperature": "warm"}', "temperature = 'warm'"),
        ("chat_template.jinja", "{% for x in %}", "template"),
    ],
)
def test_what_the_server_itself_reads_is_read(tmp_path: Path, file: str, text: str, words: str) -> None:
    model = write_servable_checkpoint(tmp_path / "model")
    assert check_front_end(str(model)).status is Status.OK
    (model / file).write_text(text)
    result = check_front_end(str(model))
    assert result.status is Status.FAIL
    assert words in result.sentence


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TARGET, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    status, sentence = check(model=str(model))
    assert status is Status.FAIL
    assert "model.safetensors" in sentence


def test_memory_beside_the_weights_is_counted() -> None:
    """400 GiB of pages are more than any machine here has; a model whose requests could never use them takes less."""
    long = str(tiny_checkpoint("31B", max_position=1 << 26))
    status, sentence = check(model=long, kv_memory=400 << 30)
    assert status is Status.FAIL
    assert "this machine has" in sentence
    assert "are wanted: weights 0.00 GiB, KV pages " in sentence
    assert check(kv_memory=400 << 30)[0] is Status.OK


def with_tensors(directory: Path, destination: Path, change: Callable[[dict[str, Tensor]], object]) -> str:
    shutil.copytree(directory, destination)
    tensors = load_file(destination / "model.safetensors")
    change(tensors)
    save_file(tensors, destination / "model.safetensors", {"format": "pt"})
    return str(destination)


UP = "model.language_model.layers.1.mlp.up_proj.weight_scale"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, f"{UP} is damaged: 1 of its 96 scales are negative, not finite or above 1e+35 (the first is nan)"),
        (0.0, f"{UP} is damaged: all of its 96 scales are 0 or below 1e-35"),
        (None, f"missing tensors: {UP}"),
    ],
)
def test_scales_are_looked_at(tmp_path: Path, value: float | None, words: str) -> None:
    packed, _ = quantized_checkpoint(TARGET, lambda _layer: "fp8-channel")
    assert check(model=str(packed))[0] is Status.OK

    def damage(tensors: dict[str, Tensor]) -> None:
        scale = tensors.pop(UP)
        if value is not None:
            tensors[UP] = torch.where(torch.arange(96).unsqueeze(1) < (96 if value == 0 else 1), value, scale)

    status, sentence = check(model=with_tensors(packed, tmp_path / "model", damage))
    assert status is Status.FAIL
    assert words in sentence


def test_the_largest_scales_are_left_to_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = quantized_checkpoint(TARGET, lambda _layer: "fp8-channel")
    model = with_tensors(packed, tmp_path / "model", lambda tensors: tensors[UP].fill_(math.nan))
    monkeypatch.setattr("gemray_workers.checkpoint.loader.CHECKED_SCALE_BYTES", 95 * 4)
    assert check(model=model)[0] is Status.OK


def test_a_drafters_scales_are_looked_at(tmp_path: Path) -> None:
    for name, maker, scale in (
        ("mtp", tiny_assistant, "pre_projection.weight_scale"),
        ("dflash", tiny_dflash, "fc.weight_scale"),
    ):
        packed, _ = quantized_checkpoint(maker(TARGET), lambda _layer: "fp8-channel")
        assert check(drafter=(str(packed),))[0] is Status.OK
        damaged = with_tensors(packed, tmp_path / name, methodcaller("pop", scale))
        status, sentence = check(drafter=(damaged,))
        assert status is Status.FAIL
        assert f"missing tensors: {scale}" in sentence


def test_scales_of_an_8_bit_cache_are_looked_at_where_one_is_asked_for(tmp_path: Path) -> None:
    scale = "model.language_model.layers.1.self_attn.v_scale"
    scaled = with_kv_scales(TARGET)
    status, sentence = check(model=str(scaled), kv_dtype="fp8_e4m3")
    assert status is Status.OK
    assert "on 1 ranks, KV pages in fp8_e4m3: requests" in sentence
    model = with_tensors(scaled, tmp_path / "model", lambda tensors: tensors[scale].zero_())
    assert check(model=model)[0] is Status.OK
    status, sentence = check(model=model, kv_dtype="fp8_e4m3")
    assert status is Status.FAIL
    assert f"{scale} is damaged: 0.0; a scale is finite and greater than 0" in sentence


def test_two_drafters_of_a_kind_are_refused(tmp_path: Path) -> None:
    """Whose directories differ, so that only their configs tell."""
    drafter = tiny_assistant(TARGET)
    shutil.copytree(drafter, tmp_path / "another")
    status, sentence = check(drafter=(str(drafter), str(tmp_path / "another")))
    assert status is Status.FAIL
    assert "(mtp)' (from the default) is not allowed: one MTP assistant and one DFlash drafter" in sentence


def test_a_drafter_that_only_the_nodes_have_is_left_to_them() -> None:
    status, sentence = check(drafter=("/nope",), address="127.0.0.1:6379")
    assert status is Status.OK
    assert sentence.startswith("a drafter is not on this machine")


def test_an_absent_drafter_is_refused_before_the_device_is_known() -> None:
    drafter = ("/nope",)
    (result,) = check_fit_before_ray(ServeSettings(model=str(TARGET), drafter=drafter), None)
    assert result.status is Status.FAIL
    assert result.sentence.startswith("drafter = '/nope'")
    assert not check_fit_before_ray(ServeSettings(model=str(TARGET), drafter=drafter, address="auto"), None)


def test_exact_numerics_are_told_or_refused_with_the_reason() -> None:
    status, sentence = check(numerics="exact")
    assert status is Status.OK
    assert "on 1 ranks, exact numerics: requests" in sentence
    packed, _ = quantized_checkpoint(TARGET, lambda layer: "int4-channel" if "mlp" in layer else None)
    status, sentence = check(model=str(packed), numerics="exact")
    assert status is Status.OK
    assert "weights int4 per channel, exact numerics: requests" in sentence
    status, sentence = check(tp=3, numerics="exact")
    assert status is Status.FAIL
    assert sentence.startswith("tp = 3 (from the default) is not allowed: it must divide"), "no numerics have it"


def test_the_family_in_a_format_can_be_kept_and_served(tmp_path: Path) -> None:
    directory = keep("modelopt-fp8", tmp_path)
    assert directory == tmp_path / "gemray-tiny-modelopt-fp8"
    status, sentence = check(model=str(directory))
    assert status is Status.OK
    assert "weights fp8 per tensor" in sentence
    assert check_front_end(str(directory)).status is Status.OK
