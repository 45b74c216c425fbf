"""The comparison of two runs that GPU tests rest on."""

from __future__ import annotations

import math

from gemray_workers.messages import SequenceDelta, SpeculationCounters
from gemray_workers.sampling.token_logprob import TokenLogprob
from support.engine.engine_runner import Result, Run
from support.engine.near_ties import Parting, partings, told


def run(**ids: list[int]) -> Run:
    """Every token has log-probability -1, and the next id is a runner-up at -1.25."""
    results = {}
    for name, tokens in ids.items():
        logprobs = [TokenLogprob(t, -1.0, [(t, -1.0), (t + 1, -1.25)]) for t in tokens]
        results[name] = Result(tokens, [SequenceDelta(request_id=name, token_ids=tokens, logprobs=logprobs)])
    return Run(results, 0, 0, {}, SpeculationCounters())


def test_runs_part_where_their_ids_first_differ() -> None:
    first, second = run(a=[1, 2, 3], b=[4, 5, 6], c=[7, 8, 9]), run(a=[1, 2, 3], b=[4, 6, 99], c=[70, 8, 9])
    assert partings(first, second) == [Parting("b", 1, 0.25), Parting("c", 0, math.inf)]
    assert partings(first, first) == []
    assert told("x", first, second) == (
        "x: 4 of 9 tokens before the first difference; gaps there in nats: b@1: 0.2500, c@0: inf"
    )
