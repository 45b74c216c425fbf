"""Random cases in exact numerics, float32: each request gets what it gets alone, ids and log-probabilities, to the bit.

Alone is: one rank, no drafter, the whole prompt in one step. A case has other requests beside it, chunks, drafts of
every drafter, pages that run out, prompts found in the cache, and gangs that fail and are built again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor

from gemray_kernels import table
from gemray_kernels.reference import exact_linear
from gemray_workers.config import KVDTypeName
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.sampling.params import DraftMethod
from support.checkpoints.tiny import VOCAB_SIZE, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine import speculation_rig
from support.engine.engine_runner import engine_config
from support.engine.exact_runs import compare, draw_ways, mixed_requests, serve_alone, serve_ways
from support.oracles import oracle
from support.processes.gang import RunOnGang
from support.random_cases.case import DRAFTERS, DrafterName
from support.random_cases.sweep import Cell, Tally, run_cell


def serve(run_on_gang: RunOnGang, tp: int, drafter: DrafterName, count: int, kv_dtype: KVDTypeName = "auto") -> Tally:
    tally = Tally()
    run_cell(run_on_gang, Cell(tp, drafter, kv_dtype, "exact"), range(count), tally)
    return tally


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [drafter for drafter in DRAFTERS if drafter != "dedicated"])
def test_a_request_has_the_bits_that_it_has_alone(run_on_gang: RunOnGang, drafter: DrafterName) -> None:
    tally = serve(run_on_gang, 1, drafter, 12)
    assert not tally.differences
    assert tally.requests > 25
    assert tally.preemptions > 0 or tally.rebuilds > 0
    assert (tally.accepted > 0) == (drafter != "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "drafter", "count"),
    [
        (2, "none", 6),
        (2, "mtp-centroids", 6),
        (4, "dflash", 4),
        (4, "mtp", 4),
        (1, "dedicated", 6),
        (2, "dedicated", 3),
    ],
)
def test_a_gang_gives_it_the_bits_of_one_rank(
    run_on_gang: RunOnGang, tp: int, drafter: DrafterName, count: int
) -> None:
    assert not serve(run_on_gang, tp, drafter, count).differences


@pytest.mark.slow
def test_an_8_bit_cache_keeps_them(run_on_gang: RunOnGang) -> None:
    assert not serve(run_on_gang, 1, "mtp", 6, kv_dtype="fp8_e4m3").differences


@pytest.mark.parametrize("shape", ["31B", "26B-A4B"])
def test_ways_of_serving_change_no_bit(shape: Shape) -> None:
    """What tests/gpu does on cards, smaller."""
    directory = tiny_checkpoint(shape)
    config = engine_config(directory, dtype="float32", numerics="exact", max_model_len=72, max_step_tokens=96)
    submits = mixed_requests(8, VOCAB_SIZE, longest=60, max_tokens=6)
    submits = [msgspec.structs.replace(submit, prompt_ids=submit.prompt_ids[:60]) for submit in submits]
    alone = serve_alone(SoloCommunicator(), config, submits)
    drafting = replace(
        config, drafter_path=str(tiny_assistant(directory)), second_drafter_path=str(tiny_dflash(directory))
    )
    methods: list[DraftMethod] = ["auto", "none", "mtp", "dflash"]
    ways = list(draw_ways(1, submits, alone, num_cases=30, methods=methods, most_drafts=3))
    served = serve_ways(SoloCommunicator(), drafting, ways)
    assert served is not None
    found = compare(ways, served, alone)
    assert not found.differences
    assert found.counts["cases"] >= 30
    assert found.counts["replays"] > 0


@contextmanager
def forgotten_models() -> Iterator[None]:
    """Models are built anew, and none of them is kept."""
    kept = (oracle.solo_model, speculation_rig.solo_rig)
    for cached in kept:
        cached.cache_clear()
    yield
    for cached in kept:
        cached.cache_clear()


@pytest.mark.slow
def test_sums_that_follow_the_rows_of_a_step_are_seen(run_on_gang: RunOnGang, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a product's splits would that follow the number of rows."""

    def wide_summands(x_TI: Tensor, weight_OI: Tensor, leaves: int) -> Tensor:
        halves = torch.split(x_TI, (len(x_TI) + 1) // 2) if len(x_TI) > 6 else (x_TI,)
        sums = [exact_linear.wide_summands(part, weight_OI, leaves if len(halves) > 1 else 2) for part in halves]
        return torch.cat([part.sum(0, keepdim=True) for part in sums], dim=1)

    faulty = replace(table.EXACT_REFERENCE, wide_summands=wide_summands, summands=wide_summands)
    monkeypatch.setattr(table, "EXACT_REFERENCE", faulty)
    with forgotten_models():
        assert serve(run_on_gang, 1, "mtp", 6).differences
