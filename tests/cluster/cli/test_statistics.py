"""The line behind an answer of `gemray generate` and `gemray chat`."""

from __future__ import annotations

import pytest

from gemray.cli.statistics import Stopwatch
from gemray.v1 import generation_pb2 as pb


@pytest.mark.parametrize(
    ("usage", "told"),
    [
        (pb.Usage(prompt_tokens=100, completion_tokens=7), "100 prompt + 7 tokens"),
        (pb.Usage(prompt_tokens=100, cached_tokens=96, completion_tokens=7), "100 prompt (96 cached) + 7 tokens"),
    ],
)
def test_the_line_tells_what_the_prefix_cache_had(usage: pb.Usage, told: str) -> None:
    completion = pb.Completion(finish_reason=pb.FINISH_REASON_LENGTH, usage=usage, seed=5)
    ended, counts, *_, seed = Stopwatch().report(completion).split(", ")
    assert (ended, counts, seed) == ("length", told, "seed 5")


def speculation(method: str, *places: int, rounds: int, drafted: int) -> pb.Speculation:
    return pb.Speculation(
        method=method, rounds=rounds, drafted=drafted, accepted=sum(places), accepted_per_position=places
    )


def test_the_line_tells_what_each_drafter_gave() -> None:
    mtp = speculation("mtp", 4, 3, 0, rounds=5, drafted=15)
    completion = pb.Completion(finish_reason=pb.FINISH_REASON_LENGTH, speculation=mtp)
    one = "mtp: 7 of 15 drafts accepted in 5 rounds (by place 4 3)"
    assert one in Stopwatch().report(completion)
    dflash = speculation("dflash", rounds=1, drafted=7)
    both = speculation("mtp+dflash", 4, 3, 0, rounds=6, drafted=22)
    both.by_method.extend([mtp, dflash])
    completion.speculation.CopyFrom(both)
    assert f"{one}, dflash: 0 of 7 drafts accepted in 1 rounds, seed" in Stopwatch().report(completion)
