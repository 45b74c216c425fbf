"""Steps in flight while the next one is planned, for tests of engines: 1 is the default of `EngineConfig` and of rigs.

A test whose cases are many runs each at one of the two, in turn, so that the suite covers both at no cost of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

LAGS = (1, 0)

at_both_lags = pytest.mark.parametrize("lag", LAGS, ids=["lag1", "lag0"])


def lags_in_turn(names: str, *choices: Sequence[Any]) -> pytest.MarkDecorator:
    """Every combination of `choices`, with lag 1 and lag 0 in turn, as the argument ``lag`` behind `names`.

    Args:
        names: of the arguments, as for `pytest.mark.parametrize`.
        choices: values of each.
    """
    cases = list(_combinations(choices))
    return pytest.mark.parametrize(f"{names}, lag", [(*case, (1 + sum(at)) % 2) for at, case in cases])


def _combinations(choices: Sequence[Sequence[Any]]) -> Iterable[tuple[list[int], list[Any]]]:
    if not choices:
        yield [], []
        return
    for index, value in enumerate(choices[0]):
        for at, rest in _combinations(choices[1:]):
            yield [index, *at], [value, *rest]
