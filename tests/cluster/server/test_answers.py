"""A request's counters agree with what its client got, wherever a stop string cuts an accepted block."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gemray_cluster.server.answers import Generation
from gemray_cluster.server.requests import AcceptedRequest
from gemray_cluster.text.output import OutputRules
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.messages import SequenceDelta, SpeculationCounters, Submit
from gemray_workers.sampling.params import SamplingParams
from support.cluster.text import byte_ids

PARAMS = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=99)


class OneRequest:
    """A gang whose only request gets these deltas."""

    def __init__(self, deltas: list[SequenceDelta]) -> None:
        self._deltas = deltas

    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        for delta in self._deltas:
            yield delta


async def run(tokenizer: ChatTokenizer, stop: str, deltas: list[SequenceDelta]) -> Generation:
    gang: Any = OneRequest(deltas)
    submit = Submit(request_id="x", prompt_ids=[1], params=PARAMS)
    generation = Generation(gang, AcceptedRequest(submit=submit, output=OutputRules(stops=(stop,))), tokenizer)
    async for _ in generation.pieces():
        pass
    return generation


async def test_what_was_cached_is_told_although_another_gang_found_nothing(tokenizer: ChatTokenizer) -> None:
    ids = byte_ids(tokenizer, b"ab")
    generation = await run(
        tokenizer,
        "no such text",
        [
            SequenceDelta(request_id="x", token_ids=ids[:1], cached_tokens=7),
            SequenceDelta(request_id="x", token_ids=ids[1:], cached_tokens=0, finish="length"),
        ],
    )
    assert generation.cached_tokens == 7


@pytest.mark.parametrize(
    ("stop", "num_tokens", "accepted_per_position"),
    [
        ("a", 1, [0, 0, 0, 0]),
        ("b", 2, [1, 0, 0, 0]),
        ("c", 3, [1, 1, 0, 0]),
        ("e", 5, [1, 1, 1, 0]),
        ("h", 8, [2, 2, 2, 0]),
        ("i", 9, [2, 2, 2, 1]),
        ("no such text", 10, [2, 2, 2, 1]),
    ],
)
async def test_drafts_behind_a_stop_string_count_as_not_accepted(
    tokenizer: ChatTokenizer, stop: str, num_tokens: int, accepted_per_position: list[int]
) -> None:
    """The first token comes without a draft; then rounds of 4 drafts accept 3 and 4."""
    ids = byte_ids(tokenizer, b"abcdefghij")
    rounds = [
        SpeculationCounters(rounds=1, drafted=4, accepted=3, accepted_per_position=[1, 1, 1, 0]),
        SpeculationCounters(rounds=2, drafted=8, accepted=7, accepted_per_position=[2, 2, 2, 1]),
    ]
    generation = await run(
        tokenizer,
        stop,
        [
            SequenceDelta(request_id="x", token_ids=ids[:1], speculation=SpeculationCounters()),
            SequenceDelta(request_id="x", token_ids=ids[1:5], speculation=rounds[0]),
            SequenceDelta(request_id="x", token_ids=ids[5:], speculation=rounds[1], finish="length"),
        ],
    )
    assert generation.num_completion_tokens == num_tokens
    counters = generation.speculation
    assert counters is not None
    if counters.rounds:
        assert counters.accepted_per_position == accepted_per_position
        assert counters.accepted == sum(accepted_per_position)
        assert counters.accepted <= num_tokens
