"""Servers with no memory flag on a card: the largest batch and the longest advertised context run within it.

    python -m pytest -q -s tests/gpu/test_kv_memory_gpu.py

takes a few minutes on one card: the embedded family, and shapes of random weights cut to `LAYERS` layers. With

    GEMRAY_MEMORY_SHAPES=31B GEMRAY_MEMORY_DRAFTERS=mtp,dflash GEMRAY_MEMORY_LAYERS=all GEMRAY_MEMORY_SECONDS=60

in the environment the shapes are the published ones, whole; each test then takes a minute or two, and a 31B wants a
card of 80 GB to itself. `python -m support.memory_stress` does the same as a table. `-s` shows each rank's memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gemray_workers.config import EngineConfig
from gemray_workers.embedded import embedded_path
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.kv_room import LEAST_HEADROOM
from support.engine.gpu import LAYERS, memory_config, needs_gpus
from support.memory_stress.fill import Filled, fill
from support.processes.gang import RunOnGang

# What others hold on the card may not change while a server measures and fills it.
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(0), pytest.mark.cards(1, whole=True)]

GIB = 1 << 30
SHAPES = os.environ.get("GEMRAY_MEMORY_SHAPES", "31B,26B-A4B,E4B").split(",")
DRAFTERS = os.environ.get("GEMRAY_MEMORY_DRAFTERS", "mtp").split(",")
_LAYERS = os.environ.get("GEMRAY_MEMORY_LAYERS", str(LAYERS))
NUM_LAYERS = None if _LAYERS == "all" else int(_LAYERS)
SECONDS = float(os.environ.get("GEMRAY_MEMORY_SECONDS", "8"))
BALLAST = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def family_config(**changes: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model_path": str(embedded_path("gemray-tiny")),
            "drafter_path": str(embedded_path("gemray-tiny-assistant")),
            "second_drafter_path": str(embedded_path("gemray-tiny-dflash")),
            "tensor_parallel_size": 1,
            "dtype": "bfloat16",
            "device": "cuda",
            **changes,
        }
    )


def check(filled: Filled, config: EngineConfig) -> None:
    """Nothing ran out, all of a batch ran at one time, and what was to stay free did."""
    memory = filled.memory
    print({name: f"{getattr(memory, name) / GIB:.2f}" for name in memory.__struct_fields__}, filled)
    assert not filled.faults
    assert filled.least_free > memory.total // LEAST_HEADROOM // 2
    assert memory.kv <= memory.kv_budget
    # A hundredth of the card: what the rehearsal of the graphs may have told too little.
    taken = memory.total - memory.elsewhere - memory.headroom
    assert taken <= memory.total * (config.gpu_memory_utilization + 0.01)
    if filled.rank == 0:
        assert filled.batch == config.max_num_seqs


def test_the_embedded_family_fills_its_pools() -> None:
    needs_gpus(1)
    check(fill(SoloCommunicator(), family_config(), SECONDS), family_config())


@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_large_model_runs_its_largest_batch_and_longest_context(tmp_path: Path, shape: str, method: str) -> None:
    needs_gpus(1)
    config = memory_config(shape, method, tmp_path, NUM_LAYERS)
    check(fill(SoloCommunicator(), config, SECONDS), config)


@pytest.mark.cards(2, whole=True)
@pytest.mark.parametrize("shape", SHAPES[:1])
def test_two_ranks_take_the_same(run_on_gang: RunOnGang, tmp_path: Path, shape: str) -> None:
    needs_gpus(2)
    config = memory_config(shape, "mtp", tmp_path, NUM_LAYERS, tensor_parallel_size=2)
    ranks = run_on_gang(2, fill, config, SECONDS, timeout_s=600.0)
    for filled in ranks:
        check(filled, config)
    assert ranks[0].memory.kv == ranks[1].memory.kv


@pytest.mark.cards(2, whole=True)
def test_a_drafter_on_its_own_card_fills_that_one(run_on_gang: RunOnGang) -> None:
    """Both rehearse, and capture, their halves of the same cycles before they say how much is left."""
    needs_gpus(2)
    dflash = str(embedded_path("gemray-tiny-dflash"))
    config = family_config(drafter_path=dflash, second_drafter_path=None, drafter_placement="dedicated", max_num_seqs=8)
    for filled in run_on_gang(2, fill, config, SECONDS, timeout_s=600.0):
        check(filled, config)
        assert filled.memory.graphs > 0


def test_the_second_server_takes_what_another_process_left() -> None:
    """Half of the card is held by another process: 0.9 of it cannot be had. A small server starts soonest."""
    needs_gpus(1)
    config = family_config(drafter_path=None, second_drafter_path=None, max_num_seqs=8)
    held = torch.cuda.mem_get_info()[1] // 2
    with subprocess.Popen(
        [sys.executable, "-c", BALLAST, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        try:
            assert other.stdout.readline() == "held\n"
            filled = fill(SoloCommunicator(), config, SECONDS, 512)
        finally:
            other.stdin.close()
    check(filled, config)
    memory = filled.memory
    left = memory.total - memory.elsewhere
    assert memory.elsewhere > held
    assert left // 2 < memory.kv_budget < left
