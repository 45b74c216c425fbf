"""Options of the tests on GPUs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from gemray_workers.config import EngineConfig
from support.engine.gpu import compile_on_gpus
from support.engine.gpu_lock import HeldCards
from support.engine.gpu_shares import cards_of_worker, num_workers, spread
from support.processes.gang import GangPools, RunOnGang


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`."""
    count = torch.cuda.device_count()
    cards = [torch.cuda.get_device_properties(card).total_memory for card in range(count)]
    return num_workers(cards, len(os.sched_getaffinity(0)))


def pytest_configure() -> None:
    """Let each worker test on another card, before CUDA is asked for anything."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards_of_worker(visible_cards(), worker))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take tests in this order; without workers files stay together."""
    if hasattr(config, "workerinput"):
        items[:] = spread([item for item in items if num_cards(item) > 1], [i for i in items if num_cards(i) == 1])


def num_cards(item: pytest.Item) -> int:
    """Cards that a test wants."""
    mark = item.get_closest_marker("cards")
    return 1 if mark is None else int(mark.args[0])


def visible_cards() -> list[str]:
    """The cards that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(torch.cuda.device_count())) if visible is None else visible.split(",")
    return [name.strip() for name in names if name.strip()]


@pytest.fixture(scope="session")
def held_cards() -> HeldCards:
    return HeldCards()


@pytest.fixture(autouse=True)
def memory_of_cards(request: pytest.FixtureRequest, held_cards: HeldCards) -> Iterator[None]:
    """A test shares its cards, the first that its process sees, with tests of other processes, or has them to itself.

    What it held is free for the next one, in whichever process that runs.
    """
    mark = request.node.get_closest_marker("cards")
    to_itself = mark is not None and mark.kwargs.get("whole", False)
    with held_cards.held(visible_cards()[: num_cards(request.node)], to_itself=to_itself):
        yield
        free_unused_memory()


def free_unused_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def cards_alone(held_cards: HeldCards) -> Callable[[int], AbstractContextManager[None]]:
    """`with cards_alone(n):` a gang over n cards is up, and no other process computes on the test's cards."""

    @contextmanager
    def alone(num_cards: int) -> Iterator[None]:
        free_unused_memory()
        with held_cards.alone(num_cards):
            yield

    return alone


@pytest.fixture(scope="session")
def run_on_gang(gang_pools: GangPools, cards_alone: Callable[[int], AbstractContextManager[None]]) -> RunOnGang:
    """As everywhere; a gang of several ranks has its test's cards to itself, over all workers of pytest-xdist.

    What its ranks launch they compile before that, beside other tests.
    """

    def run(size: int, fn: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        if size == 1:
            return gang_pools.run(size, fn, *args, **settings)
        for config in (argument for argument in args if isinstance(argument, EngineConfig)):
            gang_pools.run(size, compile_on_gpus, config)
        with cards_alone(min(size, len(visible_cards()))):  # ranks may share cards
            return gang_pools.run(size, fn, *args, **settings)

    return run


@pytest.fixture(scope="session")
def traffic_seconds(pytestconfig: pytest.Config) -> float:
    """How long mixed traffic lasts, all configurations together."""
    return float(pytestconfig.getoption("--traffic-seconds"))
