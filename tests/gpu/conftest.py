"""Options of the tests on GPUs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from support.engine.gpu_lock import cards_to_itself
from support.processes.gang import GangPools, RunOnGang


@pytest.fixture(autouse=True)
def device_memory_given_back() -> Iterator[None]:
    """What a test held is free for the next one, in whichever process that runs."""
    yield
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def run_on_gang(gang_pools: GangPools) -> RunOnGang:
    """As everywhere; a gang of several ranks has the cards that it sees to itself, over all workers of pytest-xdist."""

    def run(size: int, fn: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        if size == 1:
            return gang_pools.run(size, fn, *args, **settings)
        with cards_to_itself():
            return gang_pools.run(size, fn, *args, **settings)

    return run


@pytest.fixture(scope="session")
def traffic_seconds(pytestconfig: pytest.Config) -> float:
    """How long mixed traffic lasts, all configurations together."""
    return float(pytestconfig.getoption("--traffic-seconds"))
