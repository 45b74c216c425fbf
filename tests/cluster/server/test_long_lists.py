"""Lists of ids at the door: what is too long is refused by its length, what is not comes out bounded and once each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.server.fields import at_most
from gemray_cluster.server.sampling import read_sampling
from gemray_workers.errors import InvalidField
from gemray_workers.sampling.params import SamplingParams
from support.cluster.fake_gang import gang_info
from support.cluster.serving import DEFAULTS


class Untouchable(Collection[int]):
    """Has a length, and that is all that may be asked."""

    def __len__(self) -> int:
        return 14_000_000

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("its elements were looked at")

    def __contains__(self, value: object) -> bool:
        raise AssertionError("its elements were looked at")


def read(**fields: Any) -> SamplingParams:
    sampling = pb.SamplingParameters(**fields)
    return read_sampling(sampling, pb.SpeculationParameters(), DEFAULTS, gang_info().model, prompt_len=1)[0]


def test_a_list_that_is_too_long_is_refused_by_its_length() -> None:
    with pytest.raises(InvalidField, match="allowed = 14000000 ids is not allowed: at most 5 ids"):
        at_most("allowed", Untouchable(), 5, "ids")


def test_allowed_ids_reach_the_ranks_once_each_and_in_order() -> None:
    assert read(allowed_token_ids=[9, 7, 9] * 600 + [3]).allowed_token_ids == (3, 7, 9)
    vocab_size = gang_info().model.vocab_size
    assert read(allowed_token_ids=list(range(vocab_size))).allowed_token_ids == tuple(range(vocab_size))


def test_stop_ids_reach_the_ranks_once_each() -> None:
    assert read(stop_token_ids=[7, 106] * 128).stop_token_ids == (1, 50, 106, 7)
