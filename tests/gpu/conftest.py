"""Options of the tests on GPUs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def traffic_seconds(pytestconfig: pytest.Config) -> float:
    """How long mixed traffic lasts, all configurations together."""
    return float(pytestconfig.getoption("--traffic-seconds"))
