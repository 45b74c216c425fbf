"""Whole engines on GPUs: one request, one answer, on one card or two, with either drafter in either place."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemray_cluster.bench.host_waits import HostWaits
from gemray_cluster.bench.inbox import MeasuringInbox
from gemray_workers.config import EngineConfig
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config, request, run_engine
from support.engine.gpu import needs_gpus, published_config, run_on_gpus
from support.processes.gang import RunOnGang

pytestmark = pytest.mark.gpu

SAMPLERS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 2**63 + 11},
    {"temperature": 1.2, "seed": 5},
    {"temperature": 0.8, "min_p": 0.05, "seed": 7, "repetition_penalty": 1.2},
]


def submits(vocab_size: int, max_tokens: int, *, sampled: bool = True, count: int = 8, **params: Any) -> list[Submit]:
    rng = random.Random(3)
    return [
        request(
            f"r{i}",
            [rng.randrange(3, vocab_size) for _ in range(1 + 5 * i)],
            max_tokens,
            **(SAMPLERS[i % len(SAMPLERS)] if sampled else {}),
            **params,
        )
        for i in range(count)
    ]


def tiny_config(shape: Shape, dtype: str, **changes: Any) -> EngineConfig:
    return engine_config(tiny_checkpoint(shape), dtype=dtype, device="cuda", **changes)


DRAFTERS: dict[str, Callable[[Path], Path] | None] = {"none": None, "mtp": tiny_assistant, "dflash": tiny_dflash}


def with_drafter(shape: Shape, method: str, **changes: Any) -> dict[str, Any]:
    make = DRAFTERS[method]
    return changes if make is None else {**changes, "drafter_path": str(make(tiny_checkpoint(shape)))}


@pytest.mark.parametrize("method", ["none", "mtp", "dflash"])
@pytest.mark.parametrize("shape", ["31B", "26B-A4B", "E4B"])
def test_float64_ids_are_those_of_the_cpu(shape: Shape, method: str) -> None:
    wanted = submits(259, 24)
    plain = run_engine(SoloCommunicator(), engine_config(tiny_checkpoint(shape)), wanted)
    run = run_on_gpus(SoloCommunicator(), tiny_config(shape, "float64", **with_drafter(shape, method)), wanted)
    assert plain is not None
    assert run is not None
    assert run.ids == plain.ids
    assert (run.speculation.drafted > 0) == (method != "none")


@pytest.mark.cards(2)
@pytest.mark.parametrize("method", ["none", "mtp", "dflash"])
@pytest.mark.parametrize("shape", ["31B", "26B-A4B"])
def test_float32_ids_of_two_gpus_are_those_of_one(run_on_gang: RunOnGang, shape: Shape, method: str) -> None:
    check_two_gpus(run_on_gang, shape, method)


@pytest.mark.cards(2)
def test_float32_ids_over_nccl_are_those_of_one_gpu(run_on_gang: RunOnGang) -> None:
    """Where the one-kernel all-reduce is not sound, or not wanted."""
    check_two_gpus(run_on_gang, "26B-A4B", "mtp", all_reduce="library")


def check_two_gpus(run_on_gang: RunOnGang, shape: Shape, method: str, **changes: Any) -> None:
    needs_gpus(2)
    wanted = submits(259, 24)
    plain = run_on_gpus(SoloCommunicator(), tiny_config(shape, "float32"), wanted)
    changes = with_drafter(shape, method, tensor_parallel_size=2, **changes)
    run = run_on_gang(2, run_on_gpus, tiny_config(shape, "float32", **changes), wanted)[0]
    assert plain is not None
    assert run.ids == plain.ids


@pytest.mark.cards(2)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_drafter_on_the_second_card_changes_no_id(run_on_gang: RunOnGang, dtype: str) -> None:
    needs_gpus(2)
    wanted = submits(259, 24)
    plain = run_on_gpus(SoloCommunicator(), tiny_config("31B", dtype), wanted)
    changes = with_drafter("31B", "dflash", drafter_placement="dedicated", num_draft_tokens=5)
    config = tiny_config("31B", dtype, **changes)
    run = run_on_gang(2, run_on_gpus, config, wanted)[0]
    eager = run_on_gang(2, run_on_gpus, replace(config, enforce_eager=True), wanted)[0]
    beside = run_on_gpus(SoloCommunicator(), replace(config, drafter_placement="colocated"), wanted)
    assert plain is not None
    assert beside is not None
    assert run.ids == eager.ids == plain.ids
    assert run.speculation == eager.speculation == beside.speculation


@pytest.mark.parametrize("method", ["none", "mtp", "dflash"])
def test_a_cycle_waits_for_its_results_alone(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the events behind their copy and at the cycle's end. What else made the host wait would show in the list."""
    rank = EngineRank(published_config("31B", method, tmp_path), SoloCommunicator(), torch.device("cuda", 0))
    first, cycles = 6, 4
    waits = HostWaits()
    events: list[int] = []
    synchronize = torch.cuda.Event.synchronize
    decoded = 0

    def waited(event: torch.cuda.Event) -> None:
        events.append(decoded)
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", waited)

    def on_step(num_decoded: int) -> None:
        nonlocal decoded
        decoded = num_decoded
        if num_decoded == first:
            waits.start()
        elif num_decoded == first + cycles:
            waits.stop()

    inbox = MeasuringInbox(submits(262144, 100, sampled=False, count=4), steps=first + cycles + 1, on_step=on_step)
    rank.engine(inbox).run()
    assert not waits.places
    assert [events.count(number) for number in range(first, first + cycles)] == [2] * cycles
