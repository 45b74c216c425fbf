"""The warm-up of a rank on a card, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from gemray_workers.messages import Submit
from gemray_workers.rank import target_rank
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.warm_up import requests_of


@contextmanager
def whole_warm_up() -> Iterator[None]:
    """Ranks warm up with every kind of choice meanwhile, as where kernels are compiled at their first use."""

    def every_request(blueprint: Blueprint, *, has_grammars: bool, compiles: bool) -> list[Submit]:
        return requests_of(blueprint, has_grammars=has_grammars)

    with mock.patch.object(target_rank, "requests_of", every_request):
        yield
