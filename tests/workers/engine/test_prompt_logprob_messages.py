"""Prompt log-probabilities leave with each chunk, on rank 0 alone, in messages that the channel takes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers import channel
from gemray_workers.channel import GangChannel, LeadChannel, split_deltas
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.engine.outcomes import OutcomeReader
from gemray_workers.messages import FromGang, SequenceDelta
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.sampling.token_logprob import TokenLogprob
from support.checkpoints.tiny import tiny_checkpoint
from support.engine.engine_runner import collect, engine_config, request, serve
from support.waiting import HANG_S

LIMIT = 16_384
"""Bytes of a message: the channel's 64 MiB, scaled down by as much as the prompts are."""
PROMPT = [5, 77, 31, 200, 14, 9, 9, 150, 33, 8, 120, 61, 42] * 5


def logprob(top: int) -> TokenLogprob:
    return TokenLogprob(262_143, -12.25, [(262_143 - i, -0.125 * i) for i in range(top)])


DELTAS = st.lists(
    st.builds(
        SequenceDelta,
        request_id=st.text("ab", min_size=1, max_size=128),
        token_ids=st.lists(st.integers(0, 262_143), max_size=17),
        logprobs=st.none() | st.lists(st.builds(logprob, st.integers(0, 20)), max_size=17),
        prompt_logprobs=st.none() | st.lists(st.builds(logprob, st.integers(0, 20)), min_size=1, max_size=60),
        finish=st.sampled_from([None, "length"]),
    ),
    max_size=8,
)


def test_no_part_is_empty_before_a_delta_that_is_too_large() -> None:
    """One token's log-probabilities can be more than a part holds; they go alone."""
    large, small = (SequenceDelta(request_id="r", token_ids=[1], logprobs=[logprob(num_top)]) for num_top in (20, 0))
    assert list(split_deltas([large, small, large], 1100)) == [[large], [small], [large]]
    assert list(split_deltas([], 1100)) == [[]]


@given(deltas=DELTAS)
def test_parts_hold_everything_in_order_and_little_enough(deltas: list[SequenceDelta]) -> None:
    most_bytes = 8192
    parts = list(split_deltas(deltas, most_bytes))
    assert parts, "statistics go out in every step"
    assert all(len(msgspec.msgpack.encode(part)) <= most_bytes + 8 for part in parts)
    pieces = iter([delta for part in parts for delta in part])
    for delta in deltas:
        found: list[TokenLogprob] = []
        rest = msgspec.structs.replace(delta, prompt_logprobs=None)
        while True:
            piece = next(pieces)
            found += piece.prompt_logprobs or []
            if found == (delta.prompt_logprobs or []) and msgspec.structs.replace(piece, prompt_logprobs=None) == rest:
                break
            assert not piece.token_ids, "tokens come behind the whole prompt"
            assert piece.finish is None
            assert piece.prompt_logprobs, "an empty piece"
    assert next(pieces, None) is None


class ChannelInbox(LocalInbox):
    """Sends what the engine gives over a real channel, too."""

    def __init__(self, submits: list[Any], lead: LeadChannel) -> None:
        super().__init__(submits)
        self._lead = lead

    def send(self, message: FromGang) -> None:
        self._lead.send(message)
        super().send(message)


async def test_32_prompts_that_finish_in_one_step_fit_the_channel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their log-probabilities, 32 times 64 positions of 20, are 40 times what one message may hold."""
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", LIMIT)
    monkeypatch.setattr(channel, "MOST_DELTA_BYTES", LIMIT // 4)
    submits = [request(f"r{i}", PROMPT, 2, prompt_logprobs=20, logprobs=20) for i in range(32)]
    settings = {"max_num_seqs": 32, "max_step_tokens": 32 * len(PROMPT), "prefill_chunk": len(PROMPT)}
    rank = EngineRank(engine_config(tiny_checkpoint("31B"), **settings), SoloCommunicator(), torch.device("cpu"))
    async with GangChannel("127.0.0.1") as coordinator:
        lead = LeadChannel(coordinator.address)
        inbox = ChannelInbox(submits, lead)
        await asyncio.to_thread(rank.engine(inbox).run)
        received = LocalInbox(submits)
        while sum(delta.finish is not None for delta in received.deltas) < len(submits):
            received.send(await asyncio.wait_for(coordinator.receive(), HANG_S))
        await asyncio.to_thread(lead.close)
    assert len([m for m in inbox.steps if m.stats.step == 1 and len(m.deltas) == 32]) == 1, "all in one step"
    assert len([m for m in received.steps if m.stats.step == 1]) >= 40
    found = collect(received, submits)
    assert found.ids == collect(inbox, submits).ids
    for submit in submits:
        entries = [e for d in found.results[submit.request_id].deltas for e in d.prompt_logprobs or []]
        assert [e.token_id for e in entries] == PROMPT[1:]
        assert {len(e.top) for e in entries} == {20}


def test_each_chunk_gives_its_own() -> None:
    rank = EngineRank(engine_config(tiny_checkpoint("31B"), prefill_chunk=16), SoloCommunicator(), torch.device("cpu"))
    run = serve(rank, SoloCommunicator(), [request("a", PROMPT, 3, prompt_logprobs=1)])
    assert run is not None
    deltas = run.results["a"].deltas
    assert [len(d.prompt_logprobs or []) for d in deltas] == [16, 16, 16, 16, 0, 0, 0]
    assert [len(d.token_ids) for d in deltas] == [0, 0, 0, 0, 1, 1, 1]


class WatchedReader(OutcomeReader):
    """Counts the log-probabilities that its rank makes lists of."""

    listed = 0

    def outcomes(self, flight: Any) -> Any:
        outcomes = super().outcomes(flight)
        WatchedReader.listed += sum(len(o.prompt_logprobs or []) + len(o.logprobs or []) for o in outcomes)
        return outcomes


def serve_watched(comm: Communicator, model: str) -> tuple[int, list[int]]:
    torch.set_num_threads(1)
    WatchedReader.listed = 0
    rank = EngineRank(engine_config(model, tensor_parallel_size=comm.size), comm, torch.device("cpu"))
    rank_engine = rank.engine

    def watched(inbox: Any) -> Any:
        engine = rank_engine(inbox)
        engine._reader = WatchedReader(rank._model, comm, rank._slots)
        return engine

    rank.engine = watched  # type: ignore[method-assign,assignment]
    run = serve(rank, comm, [request("a", PROMPT, 3, prompt_logprobs=20, logprobs=2)])
    return WatchedReader.listed, [] if run is None else run.ids["a"]


def test_only_rank_0_makes_lists(run_on_gang: Any) -> None:
    (lead, ids), (follower, _) = run_on_gang(2, serve_watched, tiny_checkpoint("31B"))
    assert len(ids) == 3
    assert lead == len(PROMPT) - 1 + 3
    assert follower == 0
