"""The engine with pages of 8-bit floats, from the files on: ids with no drafter, MTP and DFlash, on 1 and 2 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from gemray_kernels.fp8_kv import FP8
from gemray_workers.config import EngineConfig
from gemray_workers.errors import CheckpointError
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.kv_scales import with_kv_scales
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config, request, run_engine
from support.oracles.plain_loop import plain_text
from support.processes.gang import RunOnGang

DRAFTERS = ("none", "mtp", "dflash")
KV: Literal["fp8_e4m3"] = "fp8_e4m3"


def config(directory: Path, method: str = "none", size: int = 1, **changes: Any) -> EngineConfig:
    paths = {"mtp": tiny_assistant, "dflash": tiny_dflash}
    path = paths[method](directory) if method in paths else None
    settings = {"tensor_parallel_size": size, "drafter_path": None if path is None else str(path), "kv_dtype": KV}
    return engine_config(directory, **{**settings, **changes})


def submits() -> list[Submit]:
    prompts = [[5, 6, 7], list(range(20, 41)), [9] * 11]
    return [request(f"r{number}", prompt, 12) for number, prompt in enumerate(prompts)]


def ids_on_rank(comm: Communicator, configs: list[EngineConfig]) -> list[dict[str, list[int]] | None]:
    runs = [run_engine(comm, config, submits()) for config in configs]
    return [None if run is None else run.ids for run in runs]


@pytest.mark.parametrize("size", [1, 2])
def test_ids_are_those_of_plain_decoding(size: int, run_on_gang: RunOnGang) -> None:
    directory = with_kv_scales(tiny_checkpoint("E2B"), "modelopt")
    configs = [config(directory, method, size) for method in DRAFTERS]
    lead, *_ = run_on_gang(size, ids_on_rank, configs)
    for found in lead:
        assert found == {s.request_id: plain_text(directory, s, kv_dtype=KV).ids for s in submits()}


def test_a_budget_holds_more_and_the_info_says_so() -> None:
    directory = tiny_checkpoint("31B")
    plain, small = (Blueprint.of(config(directory, kv_dtype=name, dtype="bfloat16")) for name in ("auto", KV))
    for before, after in zip(plain.target_specs, small.target_specs, strict=True):
        assert (before.dtype, after.dtype) == (torch.bfloat16, FP8)
        assert after.page_bytes * 2 == before.page_bytes
    assert small.kv is not None
    assert small.kv.target >= small.pools.num_bytes
    infos = [{c.what: c for c in blueprint.model_info().choices}["KV dtype"] for blueprint in (plain, small)]
    assert [info.chosen for info in infos] == ["bfloat16", KV]
    assert infos[1].reason == "chosen explicitly, with the checkpoint's scales or 1"


def test_less_memory_serves_as_many_tokens() -> None:
    directory = tiny_checkpoint("31B")
    sizes: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": None, "kv_memory_bytes": 400_000, "max_num_seqs": 2}
    plain, small = (Blueprint.of(config(directory, kv_dtype=name, **sizes)).pools for name in ("auto", KV))
    assert small.max_model_len > 1.8 * plain.max_model_len


def test_a_checkpoint_that_means_it_is_said_to() -> None:
    blueprint = Blueprint.of(config(with_kv_scales(tiny_checkpoint("31B")), kv_dtype="auto", dtype="bfloat16"))
    choice = {c.what: c for c in blueprint.model_info().choices}["KV dtype"]
    assert choice.chosen == "bfloat16"
    assert choice.reason == "the model's; the checkpoint means fp8_e4m3, which --kv-dtype fp8_e4m3 serves"


def test_a_drafter_keeps_its_own_pages_in_the_models_dtype() -> None:
    directory = tiny_checkpoint("31B")
    rank = EngineRank(config(directory, "dflash"), SoloCommunicator(), torch.device("cpu"))
    assert {spec.dtype for spec in rank._blueprint.target_specs} == {FP8}
    assert {spec.dtype for spec in rank._blueprint.drafter.kv_specs} == {torch.float64}
    choice = {c.what: c for c in rank.model_info().choices}["KV dtype"]
    assert choice.reason.endswith("the drafter's own pages are in float64")


def test_damage_is_found_before_weights_are_read(tmp_path: Path) -> None:
    source = with_kv_scales(tiny_checkpoint("31B"))
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.language_model.layers.1.self_attn.v_scale"] *= 0
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_scale is damaged: 0\.0"):
        EngineRank(config(tmp_path), SoloCommunicator(), torch.device("cpu"))
    assert run_engine(SoloCommunicator(), config(tmp_path, kv_dtype="auto"), submits()) is not None, "nobody reads it"
