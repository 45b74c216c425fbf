"""Options of the tests on GPUs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from support.engine.gpu_lock import card_memory, cards_to_itself, numbered_cards
from support.processes.gang import GangPools, RunOnGang


@pytest.fixture(autouse=True)
def memory_of_cards(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test shares the cards that its process sees with tests of other processes, or has the first ones to itself.

    What it held is free for the next one, in whichever process that runs.
    """
    cards = numbered_cards(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if cards is None:
        cards = list(range(torch.cuda.device_count()))
    alone = request.node.get_closest_marker("whole_cards")
    with card_memory(cards[: alone.args[0]] if alone else cards, to_itself=alone is not None):
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
