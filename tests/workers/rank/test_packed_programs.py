"""Packed weights of published sizes: which kernels cycles take, and that a start has compiled the exact ones."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels import packed_tiles
from gemray_kernels.triton import few_attention
from gemray_workers.checkpoint import random_weights
from gemray_workers.engine.buckets import GREEDY, PUBLISHED, bucket
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.rank.compile_ahead import plans_ahead
from gemray_workers.rank.graph_buckets import graph_buckets
from support.kernels.pretended_card import pretended_card
from support.kernels.published_layers import one_used_row, programs_of, rehearsal_of

NAMES = ("31B-it-w4a16", "31B-it-nvfp4", "31B-it-fp8")
KERNELS = {"_packed_ahead_kernel", "_exact_packed_kernel", "_packed_prompt_kernel", "_dequantize_kernel"}
"""What multiplies rows with packed weights: few rows whose weights come ahead, other few rows, prompts, and what writes
numbers down for more rows of a prompt."""
CHUNKS = (1, 6, 9, 17, 33, 65, 130, 257, 300, 513, 641)
"""Rows of a prompt on both sides of the places where products change their kernels."""


@pytest.fixture
def _no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights keep what their memory has: only where it lies decides programs."""

    def words(weight: Any, _tiling: Any, unit: Any, units: int) -> torch.Tensor:
        return torch.empty(units, weight.num_out, unit.words, dtype=torch.int16)

    monkeypatch.setattr(random_weights, "_fill", lambda *_, **__: None)
    monkeypatch.setattr(packed_tiles, "_words", words)


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
    with pretended_card():
        rehearsal = rehearsal_of(name, tmp_path, numerics="fast", max_num_seqs=12)
        start = programs_of(rehearsal, [plan for plans in plans_ahead(rehearsal.blueprint) for plan in plans])
        served = programs_of(rehearsal, [CyclePlan([], shape, GREEDY) for shape in one_used_row()])
    assert "_packed_columns_kernel" in {kernel for kernel, _ in served}
    assert served <= start, {kernel for kernel, _ in served - start}
