"""Gangs of tests on cards choose their all-reduce as a server does; here over gloo, where the choice is only noted."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from gemray_workers.config import EngineConfig
from gemray_workers.parallel.communicator import Communicator
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_dflash
from support.engine import exact_runs, gpu
from support.engine.engine_runner import engine_config, request
from support.processes.gang import RunOnGang

SUBMITS = [request("r", [5, 6, 7], 3)]


def noted_by(module: ModuleType, serve: Callable[[], object]) -> list[int]:
    """How many ranks the target had, for each time that this rank chose its all-reduce."""
    sizes: list[int] = []

    def note(_config: EngineConfig, target: Communicator, _device: torch.device) -> None:
        sizes.append(target.size)

    with mock.patch.object(module, "choose_all_reduce", note):
        serve()
    return sizes


def chosen_for_an_engine(comm: Communicator, config: EngineConfig) -> list[int]:
    return noted_by(gpu, lambda: gpu.run_on_gpus(comm, config, SUBMITS))


def chosen_for_exact_runs(comm: Communicator, config: EngineConfig) -> list[int]:
    return noted_by(exact_runs, lambda: exact_runs.serve_ways(comm, config, []))


@pytest.mark.parametrize("choose", [chosen_for_an_engine, chosen_for_exact_runs])
def test_all_ranks_of_a_target_choose(run_on_gang: RunOnGang, choose: Any) -> None:
    config = engine_config(tiny_checkpoint("31B"), tensor_parallel_size=2)
    assert run_on_gang(2, choose, config) == [[2], [2]]


def test_a_dedicated_drafter_has_no_part_in_it(run_on_gang: RunOnGang) -> None:
    target = tiny_checkpoint("31B")
    config = engine_config(target, drafter_path=str(tiny_dflash(target)), drafter_placement="dedicated")
    assert run_on_gang(2, chosen_for_an_engine, config) == [[1], []]
