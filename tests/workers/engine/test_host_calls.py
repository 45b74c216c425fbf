"""How many operations the host starts in a steady step: as many for 32 sequences as for one, at both lags."""

from __future__ import annotations

import pytest

from support.engine.host_calls import DRAFTERS, READS, steady_steps
from support.engine.lags import at_both_lags


@at_both_lags
@pytest.mark.parametrize("method", DRAFTERS)
def test_operations_of_a_step_do_not_grow_with_the_batch(method: str, lag: int) -> None:
    alone, *others = steady_steps(method, 1, lag)
    assert others == [alone] * 2, "steady steps are alike"
    many = steady_steps(method, 32, lag, steps=1)[0]
    assert many == alone, {name: (alone[name], many[name]) for name in many if many[name] != alone[name]}
    assert not READS & alone.keys(), "a step reads the device in one place, its result"


def test_a_step_ahead_costs_no_operation() -> None:
    assert steady_steps("mtp", 2, 1, steps=1) == steady_steps("mtp", 2, 0, steps=1)
