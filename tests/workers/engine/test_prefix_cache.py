"""The prefix cache in whole engines: what is found, that ids and drafts do not depend on it, and what is never found.

Drafts are compared by their counts: in float64 a drafter whose context came out of the cache accepts what it accepts
when all was computed. The trained family accepts by itself, so a wrong context would show.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gemray_workers.config import EngineConfig
from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.messages import Cancel, SequenceDelta, Submit, ToGang
from gemray_workers.rank.drafter_rank import DrafterRank
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.rank.warm_up import OneByOne
from support.checkpoints.tiny import WINDOW, tiny_checkpoint
from support.checkpoints.tiny_drafters import DFLASH_WINDOW, tiny_dflash
from support.engine.engine_runner import engine_config, request
from support.engine.held_out_requests import held_out_requests
from support.engine.speculation_rig import PAGE_SIZE, Rig, solo_rig
from support.processes.gang import RunOnGang

CPU = torch.device("cpu")
PROMPT_LEN = 100
NUM_TOKENS = 24
DRAFTERS: dict[str, EmbeddedName | None] = {
    "none": None,
    "mtp": "gemray-tiny-assistant",
    "dflash": "gemray-tiny-dflash",
}


def trained_rig(drafter: str) -> Rig:
    name = DRAFTERS[drafter]
    path = None if name is None else embedded_path(name)
    return solo_rig(embedded_path("gemray-tiny"), drafter_path=path, num_draft_tokens=4 if drafter == "mtp" else None)


def prompt() -> list[int]:
    """A held-out text of 100 tokens, so that drafters accept."""
    ids = [token for submit in held_out_requests(6, 1) for token in submit.prompt_ids]
    return ids[:PROMPT_LEN]


def in_turn(rig: Rig, submits: list[Submit], **limits: Any) -> list[SequenceDelta]:
    """Serve requests one after the other in one engine. Returns each one's tokens in one delta, its last."""
    inbox = OneByOne(submits)
    limits = {"max_step_tokens": 512, "num_slots": 4, "prefix_cache": True, **limits}
    rig.engine(inbox, **limits).run()
    return whole(inbox, submits)


def whole(inbox: LocalInbox, submits: list[Submit]) -> list[SequenceDelta]:
    return [msgspec.structs.replace(inbox.last(s.request_id), token_ids=inbox.token_ids(s.request_id)) for s in submits]


@functools.cache
def plain_answers(directory: Path, prompts: tuple[tuple[int, ...], ...], num_tokens: int) -> list[list[int]]:
    """What an engine answers that has neither a cache nor a drafter: one of the things that drafters do not change."""
    submits = [request(str(i), list(ids), num_tokens) for i, ids in enumerate(prompts)]
    return [delta.token_ids for delta in in_turn(solo_rig(directory), submits, prefix_cache=False)]


def plain_answer(directory: Path, ids: list[int], num_tokens: int) -> list[int]:
    (answer,) = plain_answers(directory, (tuple(ids),), num_tokens)
    return answer


@pytest.mark.parametrize(("drafter", "lag"), [("none", 1), ("mtp", 1), ("dflash", 1), ("dflash", 0)])
def test_the_same_prompt_twice_is_computed_once(drafter: str, lag: int) -> None:
    rig = trained_rig(drafter)
    submits = [request(name, prompt(), NUM_TOKENS) for name in ("first", "again")]
    first, again = in_turn(rig, submits, lag=lag, prefill_chunk=32)
    assert (first.cached_tokens, again.cached_tokens) == (0, 96)
    assert again.token_ids == first.token_ids
    assert again.speculation == first.speculation, "drafts depend on where their context comes from"
    assert (again.speculation is not None and again.speculation.accepted > 0) == (drafter != "none")
    assert first.token_ids == plain_answer(embedded_path("gemray-tiny"), prompt(), NUM_TOKENS)


def test_nothing_is_found_where_the_cache_is_off() -> None:
    rig, ids = solo_rig(tiny_checkpoint("31B")), [(7 * i) % 250 + 3 for i in range(40)]
    submits = [request(name, ids, 2) for name in ("first", "again")]
    assert [delta.cached_tokens for delta in in_turn(rig, submits, prefix_cache=False)] == [0, 0]
    assert [delta.cached_tokens for delta in in_turn(rig, submits)] == [0, 36]


@pytest.mark.parametrize("drafter", ["mtp", "dflash"])
def test_a_prompt_serves_requests_with_drafts_and_without(drafter: str) -> None:
    """Both ways: without drafts what was computed with them, and with drafts what was computed without."""
    rig = trained_rig(drafter)
    drafted = request("with", prompt(), NUM_TOKENS)
    plain = request("without", prompt(), NUM_TOKENS, num_draft_tokens=0)
    computed_with, found_without = in_turn(rig, [drafted, plain])
    computed_without, found_with = in_turn(rig, [plain, drafted])
    assert (found_without.cached_tokens, found_with.cached_tokens) == (96, 96)
    answers = [delta.token_ids for delta in (computed_with, found_without, computed_without, found_with)]
    assert answers == 4 * [plain_answer(embedded_path("gemray-tiny"), prompt(), NUM_TOKENS)]
    assert found_with.speculation == computed_with.speculation
    assert found_with.speculation is not None
    assert found_with.speculation.accepted > 0
    assert found_without.speculation is None or found_without.speculation.drafted == 0


@pytest.mark.parametrize("drafter", ["mtp", "dflash"])
def test_the_next_turn_of_a_chat_finds_prompt_and_answer(drafter: str) -> None:
    rig = trained_rig(drafter)
    text, expected = prompt(), list[tuple[list[int], int]]()
    submits: list[Submit] = []
    for turn in range(3):
        submit = request(f"turn {turn}", text, NUM_TOKENS)
        answer = plain_answer(embedded_path("gemray-tiny"), text, NUM_TOKENS)
        known = 0 if not submits else (len(submits[-1].prompt_ids) + NUM_TOKENS - 1) // PAGE_SIZE * PAGE_SIZE
        expected.append((answer, known))
        submits.append(submit)
        text = [*text, *answer, *prompt()[turn : turn + 9]]
    got = in_turn(rig, submits)
    assert [(delta.token_ids, delta.cached_tokens) for delta in got] == expected


@pytest.mark.parametrize("drafter", ["none", "dflash"])
def test_lengths_around_pages_and_windows(drafter: str) -> None:
    """The last token is always computed, and its row sees a whole window of what was found."""
    directory = tiny_checkpoint("31B")
    path = tiny_dflash(directory, block_size=4) if drafter == "dflash" else None
    rig = solo_rig(directory, drafter_path=path)
    ids = [(7 * i) % 250 + 3 for i in range(80)]
    near = [w + d for w in (PAGE_SIZE, WINDOW, DFLASH_WINDOW, 2 * WINDOW, 40) for d in (-1, 0, 1, 2)]
    lengths = sorted(set(near))
    submits = [request(f"{length}", ids[:length], 4) for length in lengths]
    alone = plain_answers(directory, tuple(tuple(ids[:length]) for length in lengths), 4)
    twice = in_turn(rig, [*submits, *[msgspec.structs.replace(s, request_id=f"{s.request_id} again") for s in submits]])
    assert [delta.token_ids for delta in twice] == 2 * alone
    again = [delta.cached_tokens for delta in twice[len(submits) :]]
    assert again == [(length - 1) // PAGE_SIZE * PAGE_SIZE for length in lengths]


def test_prompt_logprobs_are_computed_and_not_found() -> None:
    rig = solo_rig(tiny_checkpoint("31B"))
    ids = [(7 * i) % 250 + 3 for i in range(40)]
    submits = [
        request("plain", ids, 4),
        request("asks", ids, 4, prompt_logprobs=2),
        msgspec.structs.replace(request("has some", ids, 4, prompt_logprobs=2), num_prompt_logprobs=18),
    ]
    inbox = OneByOne(submits)
    rig.engine(inbox, prefix_cache=True).run()
    _, asks, has_some = whole(inbox, submits)
    assert (asks.cached_tokens, has_some.cached_tokens) == (0, 16), "the row at 18 gives position 19"
    entries = {
        name: [e for d in inbox.deltas if d.request_id == name for e in d.prompt_logprobs or []]
        for name in ("asks", "has some")
    }
    assert [e.token_id for e in entries["asks"]] == ids[1:]
    assert [e.token_id for e in entries["has some"]] == ids[19:]
    for computed, found in zip(entries["asks"][18:], entries["has some"], strict=True):
        assert computed.logprob == pytest.approx(found.logprob, abs=1e-9)


def test_salts_keep_requests_apart() -> None:
    rig = solo_rig(tiny_checkpoint("31B"))
    ids = [(7 * i) % 250 + 3 for i in range(40)]
    salts = ["", "tenant", "tenant", ""]
    submits = [msgspec.structs.replace(request(str(i), ids, 4), cache_salt=s) for i, s in enumerate(salts)]
    assert [delta.cached_tokens for delta in in_turn(rig, submits)] == [0, 0, 36, 36]


class CancelInPrefill(OneByOne):
    """The first request is cancelled after a few steps of its prompt."""

    def __init__(self, submits: list[Submit], after: int) -> None:
        super().__init__(submits)
        self._name = submits[0].request_id
        self._after = after
        self._polls = 0

    def poll(self, timeout_s: float) -> list[ToGang]:
        self._polls += 1
        return [Cancel(self._name)] if self._polls == 1 + self._after else super().poll(timeout_s)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_request_that_is_cancelled_in_its_prefill_leaves_nothing_half_written(after: int, lag: int) -> None:
    directory = tiny_checkpoint("31B")
    rig = solo_rig(directory, drafter_path=tiny_dflash(directory, block_size=4))
    ids = [(7 * i) % 250 + 3 for i in range(60)]
    submits = [request("cancelled", ids, 4), request("next", ids, 12)]
    inbox = CancelInPrefill(submits, after)
    rig.engine(inbox, prefill_chunk=9, lag=lag, prefix_cache=True).run()
    assert inbox.last("cancelled").finish == "cancelled"
    assert inbox.token_ids("next") == plain_answer(directory, ids, 12)
    assert inbox.last("next").cached_tokens == (after - lag) * 9 // PAGE_SIZE * PAGE_SIZE, "what was committed"


def serve_in_turn(comm: Any, config: EngineConfig, submits: list[Submit]) -> list[SequenceDelta] | None:
    """On every rank of a gang, a drafter's own among them."""
    torch.set_num_threads(1)
    is_dedicated = config.drafter_placement == "dedicated"
    if comm.rank == config.tensor_parallel_size:
        DrafterRank(config, comm, CPU).engine().run()
        return None
    target = comm.subgroup(config.tensor_parallel_size, "target") if is_dedicated else comm
    rank = EngineRank(config, target, CPU, gang=comm if is_dedicated else None)
    if comm.rank != 0:
        rank.engine(None).run()
        return None
    inbox = OneByOne(submits)
    rank.engine(inbox).run()
    return whole(inbox, submits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "drafter", "placement"),
    [
        (2, "none", "colocated"),
        (2, "mtp", "colocated"),
        (2, "dflash", "colocated"),
        (1, "dflash", "dedicated"),
    ],
)
def test_ranks_find_the_same_pages(run_on_gang: RunOnGang, tp: int, drafter: str, placement: Any) -> None:
    name = DRAFTERS[drafter]
    config = engine_config(
        embedded_path("gemray-tiny"),
        tensor_parallel_size=tp,
        drafter_path=None if name is None else str(embedded_path(name)),
        drafter_placement=placement,
        max_step_tokens=None,
        prefill_chunk=32,
        page_size=PAGE_SIZE,
        prefix_cache=True,
    )
    submits = [request(name, prompt(), NUM_TOKENS) for name in ("first", "again")]
    (first, again), *_ = run_on_gang(config.gang_size, serve_in_turn, config, submits)
    assert (first.cached_tokens, again.cached_tokens) == (0, 96)
    assert again.token_ids == first.token_ids == plain_answer(embedded_path("gemray-tiny"), prompt(), NUM_TOKENS)
    assert again.speculation == first.speculation
