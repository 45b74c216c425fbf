"""No example fails for the machine's speed, whatever else a test sets."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings

from support.hypothesis_settings import FIXTURE_SERVES_ALL


@pytest.mark.parametrize(
    "chosen", [settings(), settings(max_examples=7), settings(suppress_health_check=FIXTURE_SERVES_ALL)]
)
def test_the_machine_may_be_slow(chosen: settings) -> None:
    assert chosen.deadline is None
    assert HealthCheck.too_slow in chosen.suppress_health_check
    assert settings(chosen, deadline=200).deadline == timedelta(milliseconds=200), "what a test says holds"
