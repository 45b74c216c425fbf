"""Packed weights of published sizes: which kernels cycles take, and that a start has compiled the exact ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels import packed_tiles
from gemray_kernels.triton import few_attention
from gemray_workers.checkpoint import random_weights
from gemray_workers.config import EngineConfig, NumericsName
from gemray_workers.engine.buckets import GREEDY, PUBLISHED, bucket
from gemray_workers.execution.cycle_rows import CyclePlan, CycleShape
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.compile_ahead import Rehearsal, plans_ahead
from gemray_workers.rank.graph_buckets import graph_buckets
from gemray_workers.rank.target_rank import EngineRank
from support.engine.gpu import CONFIGS
from support.kernels.pretended_card import pretended_card

NAMES = ("31B-it-w4a16", "31B-it-nvfp4", "31B-it-fp8")
KERNELS = {"_packed_ahead_kernel", "_exact_packed_kernel", "_packed_prompt_kernel", "_dequantize_kernel"}
"""What multiplies rows with packed weights: few rows whose weights come ahead, other few rows, prompts, and what writes
numbers down for more rows of a prompt."""
CHUNKS = (1, 6, 9, 17, 33, 65, 130, 257, 300, 513, 641)
"""Rows of a prompt on both sides of the places where products change their kernels."""


def shape_of_few_layers(name: str, directory: Path) -> Path:
    """A sliding and a full layer of a published model, and two that share their keys where some do, with a small
    vocabulary."""
    config = json.loads((CONFIGS / name / "config.json").read_text())
    text = config["text_config"]
    layers = ["sliding_attention", "full_attention"]
    if text.get("num_kv_shared_layers"):
        layers *= 2
        text |= {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 4096}
    text |= {"vocab_size": 4096, "num_hidden_layers": len(layers), "layer_types": layers}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def _no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights keep what their memory has: only where it lies decides programs."""

    def words(weight: Any, _tiling: Any, unit: Any, units: int) -> torch.Tensor:
        return torch.empty(units, weight.num_out, unit.words, dtype=torch.int16)

    monkeypatch.setattr(random_weights, "_fill", lambda *_, **__: None)
    monkeypatch.setattr(packed_tiles, "_words", words)


def rehearsal_of(name: str, directory: Path, numerics: NumericsName = "exact", max_num_seqs: int = 1) -> Rehearsal:
    config = EngineConfig(
        model_path=str(shape_of_few_layers(name, directory)),
        tensor_parallel_size=1,
        dtype="bfloat16",
        device="cpu",
        numerics=numerics,
        random_weights=True,
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        max_step_tokens=700,
        prefill_chunk=700,
        kv_memory_bytes=1 << 28,
    )
    return EngineRank(config, SoloCommunicator(), torch.device("cpu")).rehearsal()


def programs_of(rehearsal: Rehearsal, plans: list[CyclePlan]) -> set[tuple[str, Any]]:
    return {(program.name, program.arguments[0]) for program in rehearsal.programs(plans)}


@pytest.mark.slow
@pytest.mark.usefixtures("_no_numbers")
@pytest.mark.parametrize("name", NAMES)
def test_a_start_has_compiled_all_that_cycles_of_packed_weights_launch(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), pretended_card():
        rehearsal = rehearsal_of(name, tmp_path)
        start = programs_of(rehearsal, [plan for plans in plans_ahead(rehearsal.blueprint) for plan in plans])
        plans = [CyclePlan([], bucket(1, (), rows), PUBLISHED) for rows in CHUNKS]
        plans += [CyclePlan([], *key) for key in graph_buckets(rehearsal.blueprint)]
        served = programs_of(rehearsal, plans)
    assert "could not be rehearsed" not in caplog.text
    assert served <= start, served - start
    assert {kernel for kernel, _ in served} >= KERNELS


@pytest.mark.usefixtures("_no_numbers")
@pytest.mark.parametrize(("name", "at_once"), [("31B-it-w4a16", True), ("31B-it", False)])
def test_a_projection_that_asks_for_its_weight_first_starts_with_the_last_of_attention(
    name: str, at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_attention, "starts_early", lambda _: True)
    with pretended_card():
        rehearsal = rehearsal_of(name, tmp_path, numerics="fast")
        programs = rehearsal.programs([CyclePlan([], bucket(1, (), 1), GREEDY)])
    combining = [program.arguments for program in programs if program.name == "combine_kernel"]
    found = [constants[list(names).index("LETS_AT_ONCE"),] for _, names, _, constants, *_ in combining]
    assert found.count(at_once) >= 1, "the sliding layer's"
    assert found.count(True) == at_once


@pytest.mark.usefixtures("_no_numbers")
def test_experts_are_launched_behind_the_router(tmp_path: Path) -> None:
    """Behind the MLP's products, which let them start at once, they would crowd onto the multiprocessors left free."""
    with pretended_card():
        rehearsal = rehearsal_of("26B-A4B-it-w4a16", tmp_path, numerics="fast")
        programs = rehearsal.programs([CyclePlan([], bucket(1, (), 1), GREEDY)])
    names = [program.name for program in programs]
    assert "_packed_columns_kernel" in names
    assert names[names.index("_packed_expert_kernel") - 1] == "_route_kernel"


@pytest.mark.slow
@pytest.mark.usefixtures("_no_numbers")
@pytest.mark.parametrize("name", ["E4B-it-w4a16", "E2B-it-w4a16"])
def test_a_start_has_compiled_what_one_used_row_of_prompts_launches(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that share keys run on used rows alone: one row, and as many sequences as in any step."""
    monkeypatch.setattr(few_attention, "starts_early", lambda _: True)
    shapes = [
        CycleShape(
            num_sequences=num_seqs,
            num_choosing=1,
            num_rows=300,
            most_rows=most_rows,
            num_outputs=1,
            most_outputs=1,
            most_keys=most_rows,
        )
        for num_seqs, most_rows in ((1, 300), (2, 200), (5, 60), (8, 60), (12, 60))
    ]
    with pretended_card():
        rehearsal = rehearsal_of(name, tmp_path, numerics="fast", max_num_seqs=12)
        start = programs_of(rehearsal, [plan for plans in plans_ahead(rehearsal.blueprint) for plan in plans])
        served = programs_of(rehearsal, [CyclePlan([], shape, GREEDY) for shape in shapes])
    assert "_packed_columns_kernel" in {kernel for kernel, _ in served}
    assert served <= start, {kernel for kernel, _ in served - start}
