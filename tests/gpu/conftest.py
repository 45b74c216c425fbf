"""Options of the tests on GPUs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def device_memory_given_back() -> Iterator[None]:
    """What a test held is free for the next one, in whichever process that runs."""
    yield
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def traffic_seconds(pytestconfig: pytest.Config) -> float:
    """How long mixed traffic lasts, all configurations together."""
    return float(pytestconfig.getoption("--traffic-seconds"))
