"""Plain weights of published sizes on a Hopper card: that a start has compiled what cycles launch, and who anchors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton import attention_inputs, few_attention, layer_norms, linear, linear_ahead, linear_choice
from gemray_workers.checkpoint import random_weights
from gemray_workers.engine.buckets import GREEDY, PUBLISHED, bucket
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.rank.compile_ahead import plans_ahead
from gemray_workers.rank.graph_buckets import graph_buckets
from support.kernels.pretended_card import pretended_card
from support.kernels.published_layers import one_used_row, programs_of, rehearsal_of

CHUNKS = (1, 6, 9, 17, 33, 65, 130, 257)
"""Rows of a prompt on both sides of the places where products change their kernels."""
AHEAD = "_linear_ahead_kernel"


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels start early, and products come ahead, as on a card; weights have no numbers."""
    monkeypatch.setattr(random_weights, "_fill", lambda *_, **__: None)
    monkeypatch.setattr(linear_choice, "on_hopper", lambda _: True)
    for module in (attention_inputs, few_attention, layer_norms, linear, linear_ahead):
        monkeypatch.setattr(module, "starts_early", lambda _: True)
    with pretended_card():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", ["31B-it", "E4B-it", "26B-A4B-it"])
def test_a_start_has_compiled_all_that_cycles_launch(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        rehearsal = rehearsal_of(name, tmp_path, numerics="fast", max_num_seqs=12)
        start = programs_of(rehearsal, [plan for plans in plans_ahead(rehearsal.blueprint) for plan in plans])
        plans = [CyclePlan([], bucket(1, (), rows), PUBLISHED) for rows in CHUNKS]
        plans += [CyclePlan([], *key) for key in graph_buckets(rehearsal.blueprint)]
        plans += [CyclePlan([], shape, GREEDY) for shape in one_used_row()]
        served = programs_of(rehearsal, plans)
    assert "could not be rehearsed" not in caplog.text
    assert served <= start, served - start
    assert AHEAD in {kernel for kernel, _ in served}


def of_one_pass(
    name: str, sequences: int, directory: Path, plain: Sequence[str] = ()
) -> list[tuple[str, dict[str, Any]]]:
    """Programs of a decode pass, in the order of their first launches, with what they are compiled for."""
    rehearsal = rehearsal_of(name, directory, numerics="fast", max_num_seqs=sequences, plain=plain)
    found = []
    for program in rehearsal.programs([CyclePlan([], bucket(sequences, ()), GREEDY)]):
        _, names, _, constants, *_ = program.arguments
        found.append((program.name, {list(names)[index]: value for (index,), value in constants.items()}))
    return found


@pytest.mark.parametrize("name", ["31B-it", "E4B-it", "26B-A4B-it"])
def test_norms_let_products_start_at_once_and_gated_ones_anchor(name: str, tmp_path: Path) -> None:
    """Where norms let the next kernel start before they wait, something between any two attentions does not."""
    programs = of_one_pass(name, 1, tmp_path)
    norms = [constants["AT_ONCE"] for kernel, constants in programs if kernel == "_add_then_norms_kernel"]
    assert norms
    assert all(norms)
    shapes = [constants["SHAPE"] for kernel, constants in programs if kernel == AHEAD]
    assert any(shape.gate for shape in shapes)
    assert all(shape.anchors for shape in shapes if shape.gate)
    assert not all(shape.anchors for shape in shapes)


@pytest.mark.parametrize(("name", "sequences"), [("31B-it", 17), ("31B-it-w4a16", 1)])
def test_norms_anchor_where_products_do_not(name: str, sequences: int, tmp_path: Path) -> None:
    """Packed gated products let the next kernel start at once."""
    found = of_one_pass(name, sequences, tmp_path)
    norms = [constants["AT_ONCE"] for kernel, constants in found if kernel == "_add_then_norms_kernel"]
    assert norms
    assert not any(norms)


@pytest.mark.parametrize(("plain", "before_gate", "before_qkv"), [("self_attn", False, True), ("mlp", True, False)])
def test_each_layer_has_an_anchor_where_some_products_are_packed(
    plain: str, before_gate: bool, before_qkv: bool, tmp_path: Path
) -> None:
    """The norm before a packed gated product, or a plain gated product."""
    found = of_one_pass("31B-it-w4a16", 1, tmp_path, plain=[f"re:.*{plain}.*"])
    norms = [constants for kernel, constants in found if kernel == "_add_then_norms_kernel"]
    # The last norms of a layer scale the stream.
    assert {(norm["HAS_SCALE"], norm["AT_ONCE"]) for norm in norms} == {(False, before_gate), (True, before_qkv)}
