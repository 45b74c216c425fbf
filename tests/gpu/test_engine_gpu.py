"""Whole engines on GPUs: one request, one answer, over NCCL, with either drafter in either place."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gemray_cluster.bench.host_waits import HostWaits
from gemray_cluster.bench.inbox import MeasuringInbox
from gemray_workers.config import EngineConfig
from gemray_workers.engine.rank import EngineRank
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from support.engine_runner import Run, engine_config, request, run_engine
from support.gang import RunOnGang
from support.gpu import run_on_gpus
from support.near_ties import partings, told
from support.tiny import Shape, tiny_checkpoint
from support.tiny_drafters import tiny_assistant, tiny_dflash

pytestmark = pytest.mark.gpu

CONFIGS = Path(__file__).resolve().parents[2] / "benchmarks" / "configs"
NEAR_TIE = 0.05
"""Nats between two tokens of which bfloat16 may choose either: logits here spread by about 0.25, rounded at 1%."""
SAMPLERS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 2**63 + 11},
    {"temperature": 1.2, "seed": 5},
    {"temperature": 0.8, "min_p": 0.05, "seed": 7, "repetition_penalty": 1.2},
]


def needs_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, {torch.cuda.device_count()} are here")


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


@pytest.mark.parametrize("method", ["none", "mtp", "dflash"])
@pytest.mark.parametrize("shape", ["31B", "26B-A4B"])
def test_float32_ids_over_nccl_are_those_of_one_gpu(run_on_gang: RunOnGang, shape: Shape, method: str) -> None:
    needs_gpus(2)
    wanted = submits(259, 24)
    plain = run_on_gpus(SoloCommunicator(), tiny_config(shape, "float32"), wanted)
    changes = with_drafter(shape, method, tensor_parallel_size=2)
    run = run_on_gang(2, run_on_gpus, tiny_config(shape, "float32", **changes), wanted)[0]
    assert plain is not None
    assert run.ids == plain.ids


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_drafter_on_the_second_card_changes_no_id(run_on_gang: RunOnGang, dtype: str) -> None:
    needs_gpus(2)
    wanted = submits(259, 24)
    plain = run_on_gpus(SoloCommunicator(), tiny_config("31B", dtype), wanted)
    changes = with_drafter("31B", "dflash", drafter_placement="dedicated", max_draft_tokens=5)
    run = run_on_gang(2, run_on_gpus, tiny_config("31B", dtype, **changes), wanted)[0]
    beside = run_on_gpus(
        SoloCommunicator(), tiny_config("31B", dtype, **{**changes, "drafter_placement": "colocated"}), wanted
    )
    assert plain is not None
    assert beside is not None
    assert run.ids == plain.ids
    assert run.speculation == beside.speculation


@pytest.fixture(scope="module")
def cut_31b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published 31B shape and its drafters, twelve layers deep."""
    base = tmp_path_factory.mktemp("31B")
    target = json.loads((CONFIGS / "31B-it" / "config.json").read_text())
    target["text_config"]["num_hidden_layers"] = 12
    target["text_config"]["layer_types"] = target["text_config"]["layer_types"][:12]
    dflash = json.loads((CONFIGS / "31B-it-DFlash" / "config.json").read_text())
    dflash["num_target_layers"] = 12
    dflash["dflash_config"]["target_layer_ids"] = [1, 3, 5, 7, 9, 10]
    for name, config in (("target", target), ("dflash", dflash)):
        (base / name).mkdir()
        (base / name / "config.json").write_text(json.dumps(config))
    shutil.copytree(CONFIGS / "31B-it-assistant", base / "mtp")
    return base


def cut_config(base: Path, method: str, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "device": "cuda",
        "kv_memory_bytes": 4 << 30,
        "max_step_tokens": 512,
        "page_size": 16,
        "random_weights": True,
        **changes,
    }
    if method != "none":
        settings["drafter_path"] = str(base / method)
    return engine_config(base / "target", **settings)


@pytest.fixture(scope="module")
def plain_bf16(cut_31b: Path) -> Run:
    run = run_on_gpus(SoloCommunicator(), cut_config(cut_31b, "none"), bf16_submits())
    torch.cuda.empty_cache()
    assert run is not None
    return run


def bf16_submits() -> list[Submit]:
    """Greedy, and long enough to part somewhere."""
    return submits(262144, 32, sampled=False, logprobs=4)


def check_near_ties(name: str, plain: Run, other: Run, record: Callable[[str, object], None]) -> None:
    line = told(name, plain, other)
    record("near_ties", line)
    print(line)
    assert all(parting.gap < NEAR_TIE for parting in partings(plain, other)), line


@pytest.mark.parametrize("method", ["none", "mtp", "dflash"])
@pytest.mark.parametrize("tp", [1, 2])
def test_bfloat16_ids_part_at_near_ties_alone(
    run_on_gang: RunOnGang,
    cut_31b: Path,
    plain_bf16: Run,
    method: str,
    tp: int,
    record_property: Callable[[str, object], None],
) -> None:
    needs_gpus(tp)
    config = cut_config(cut_31b, method, tensor_parallel_size=tp)
    run = run_on_gang(tp, run_on_gpus, config, bf16_submits())[0]
    check_near_ties(f"31B shape, 12 layers, TP {tp}, {method}", plain_bf16, run, record_property)


@pytest.mark.parametrize("method", ["none", "mtp", "dflash"])
def test_a_cycle_waits_for_the_device_once(cut_31b: Path, method: str) -> None:
    """To read what was accepted. What else made the host wait would show in the list."""
    rank = EngineRank(cut_config(cut_31b, method), SoloCommunicator(), torch.device("cuda", 0))
    first, cycles = 6, 4
    waits = HostWaits()

    def on_step(num_decoded: int) -> None:
        if num_decoded == first:
            waits.start()
        elif num_decoded == first + cycles:
            waits.stop()

    inbox = MeasuringInbox(submits(262144, 100, sampled=False, count=4), steps=first + cycles + 1, on_step=on_step)
    rank.engine(inbox).run()
    assert sum(waits.places.values()) == cycles, waits.places
