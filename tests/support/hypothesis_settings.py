"""Hypothesis on a machine that may be slow and shared: no example is too slow, neither to run nor to draw."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

SLOW_IS_FINE = (HealthCheck.too_slow,)
FIXTURE_SERVES_ALL = (*SLOW_IS_FINE, HealthCheck.function_scoped_fixture)
"""For a test whose fixture is the same for all examples; what a test suppresses takes the place of the profile's."""


def load_profile() -> None:
    """Take the suite's settings for the tests that are defined from now on.

    Hypothesis' own fail an example that takes 200 ms, or whose drawing takes long: both hang on the machine.
    """
    settings.register_profile("any machine", deadline=None, suppress_health_check=SLOW_IS_FINE)
    settings.load_profile("any machine")
