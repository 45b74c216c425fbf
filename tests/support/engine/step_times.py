"""Times of steps as a test wants them, for engines that decide by what they measured.

A machine that other tests share measures something else each time, and an engine of two drafters, or one that adapts
its number of drafts, then takes other steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from gemray_workers.execution.step_clock import HostMarks, StepTimes


def steady() -> float:
    """Seconds of any step: a millisecond, however many drafts it had."""
    return 1e-3


def erratic(seed: int) -> Callable[[], float]:
    """Seconds of steps between 0.1 ms and 0.1 s, without any order."""
    rng = random.Random(seed)
    return lambda: float(10 ** -rng.uniform(1, 4))


@contextmanager
def step_times(seconds: Callable[[], float]) -> Iterator[None]:
    """Put `seconds()` in the place of what the host measures of each step."""
    with patch.object(HostMarks, "times", lambda _: StepTimes(verify=seconds())):
        yield
