"""The engine on quantized checkpoints, from the files on: ids with no drafter, MTP and DFlash, on 1 and 2 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from gemray_workers.config import EngineConfig
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from support.checkpoints.quantized import every_format_in_turn
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config, request, run_engine
from support.processes.gang import RunOnGang

SHAPES: tuple[Shape, ...] = ("31B", "26B-A4B")
DRAFTERS = ("none", "mtp", "dflash")
NUM_TOKENS = 12


def config(directory: Path, method: str, size: int, **changes: Any) -> EngineConfig:
    paths = {"mtp": tiny_assistant, "dflash": tiny_dflash}
    path = paths[method](directory) if method in paths else None
    return engine_config(
        directory,
        tensor_parallel_size=size,
        dtype="float64",
        drafter_path=None if path is None else str(path),
        **changes,
    )


def submits() -> list[Submit]:
    prompts = [[5, 6, 7], list(range(20, 41)), [9] * 11]
    return [request(f"r{number}", prompt, NUM_TOKENS) for number, prompt in enumerate(prompts)]


def ids_on_rank(comm: Communicator, configs: list[EngineConfig]) -> list[list[list[int]] | None]:
    return [ids(comm, config) for config in configs]


def ids(comm: Communicator, config: EngineConfig) -> list[list[int]] | None:
    run = run_engine(comm, config, submits())
    if run is None:
        return None
    return [run.results[submit.request_id].ids for submit in submits()]


@pytest.mark.parametrize("library", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("shape", SHAPES)
def test_ids_do_not_depend_on_drafter_or_ranks(
    run_on_gang: RunOnGang, shape: Shape, library: Literal["compressed-tensors", "modelopt"]
) -> None:
    directory, _ = every_format_in_turn(tiny_checkpoint(shape), library)
    expected = ids(SoloCommunicator(), config(directory, "none", 1))
    assert expected is not None
    assert all(len(found) == NUM_TOKENS for found in expected)
    assert expected != ids(SoloCommunicator(), config(tiny_checkpoint(shape), "none", 1)), "quantizing changed nothing"
    for method in ("mtp", "dflash"):
        assert ids(SoloCommunicator(), config(directory, method, 1)) == expected, method
    sharded = run_on_gang(2, ids_on_rank, [config(directory, method, 2) for method in DRAFTERS])
    assert sharded[0] == [expected] * len(DRAFTERS)
