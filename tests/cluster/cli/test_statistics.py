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
