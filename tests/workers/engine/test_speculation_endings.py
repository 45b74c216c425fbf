"""What a client sees beside ids is the same inside an accepted block: endings, log-probabilities, counters.

The drafters know the text as it would go on without stops, so that stop ids are accepted together with what lies
behind them; nothing of that may come out.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from gemray_workers.messages import SpeculationCounters, Submit
from gemray_workers.sampling.token_logprob import TokenLogprob
from support.checkpoints.tiny import VOCAB_SIZE, Shape, tiny_checkpoint
from support.engine.engine_runner import Result, Run, request
from support.engine.lags import at_both_lags
from support.engine.random_requests import random_requests
from support.engine.scripted_drafters import (
    Round,
    Script,
    ScriptedDrafter,
    Texts,
    always_right,
    always_wrong,
    in_turn,
    plain_texts,
    randomly_right,
    right_until,
)
from support.engine.speculation_rig import Rig, solo_rig

PROMPT = [5, 77, 31, 200, 14, 9, 9, 150, 33]
NUM_DRAFT_TOKENS = 8
SHAPE: Shape = "31B"


def plain_rig() -> Rig:
    return solo_rig(tiny_checkpoint(SHAPE))


def drafting_rig() -> Rig:
    return solo_rig(tiny_checkpoint(SHAPE), num_draft_tokens=NUM_DRAFT_TOKENS)


def without_stops(submits: list[Submit]) -> list[Submit]:
    return [
        msgspec.structs.replace(s, params=msgspec.structs.replace(s.params, stop_token_ids=(), min_tokens=0))
        for s in submits
    ]


def longest_texts(submits: list[Submit], plain: Run) -> dict[str, list[int]]:
    """Plain texts, going on behind a stop id where they would without one."""
    free = plain_texts(submits, plain_rig().run(without_stops(submits)).ids)
    stopped = plain_texts(submits, plain.ids)
    return {i: free[i] if free[i][: len(stopped[i])] == stopped[i] else stopped[i] for i in stopped}


def gather(result: Result, field: str) -> list[TokenLogprob]:
    return [entry for delta in result.deltas for entry in getattr(delta, field) or []]


def assert_same_logprobs(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [(e.token_id, [i for i, _ in e.top]) for e in found] == [
        (e.token_id, [i for i, _ in e.top]) for e in expected
    ]
    for f, e in zip(found, expected, strict=True):
        assert f.logprob == pytest.approx(e.logprob, abs=1e-9)
        assert [value for _, value in f.top] == pytest.approx([value for _, value in e.top], abs=1e-9)


def assert_same_results(found: Run, expected: Run) -> None:
    for request_id, result in expected.results.items():
        other = found.results[request_id]
        assert other.ids == result.ids, request_id
        assert other.last.finish == result.last.finish
        assert other.last.matched_stop_id == result.last.matched_stop_id
        for field in ("logprobs", "prompt_logprobs"):
            assert_same_logprobs(gather(other, field), gather(result, field))
        for delta in other.deltas:
            assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
        assert [d.finish for d in other.deltas[:-1]] == [None] * (len(other.deltas) - 1)


def random_endings(seed: int, count: int) -> list[Submit]:
    """Random requests that stop often, at ids of their own, with log-probabilities wanted by most."""
    rng = random.Random(seed)
    submits = []
    for submit in random_requests(seed, count, num_draft_tokens=NUM_DRAFT_TOKENS, max_tokens=40):
        stops = tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 5, 20, 40))))
        params = msgspec.structs.replace(
            submit.params,
            stop_token_ids=stops,
            min_tokens=rng.choice((0, 0, 0, 3, 7)),
            logprobs=rng.choice((None, 0, 3)),
            prompt_logprobs=rng.choice((None, 0, 2)),
        )
        submits.append(msgspec.structs.replace(submit, params=params))
    return submits


@pytest.mark.parametrize("seed", range(3))
def test_everything_a_client_sees_equals_the_run_without_drafts(seed: int) -> None:
    submits = random_endings(seed, 36)
    plain = plain_rig().run(submits, max_model_len=72)
    texts = longest_texts(submits, plain)
    scripts = [always_right(texts), in_turn(*(right_until(texts, VOCAB_SIZE, j) for j in (0, 1, 2, 5, 8)))]
    scripts.append(in_turn(always_right(texts), stop_ids_of(submits, texts)))
    for i, (script, chunk) in enumerate(zip(scripts, (64, 5, 16), strict=True)):
        drafter = ScriptedDrafter(script)
        lag = (seed + i) % 2
        run = drafting_rig().run(submits, drafter=drafter, max_model_len=72, prefill_chunk=chunk, lag=lag)
        assert_same_results(run, plain)
    finishes = {(r.last.finish, len(r.ids) > 1) for r in plain.results.values()}
    assert finishes >= {("stop_token", True), ("length", True)}


def stop_ids_of(submits: list[Submit], texts: Texts) -> Script:
    """Each request's own stop ids, whether or not one is due."""
    stops = {s.request_id: s.params.stop_token_ids or (1,) for s in submits}
    return lambda request_id, position, count: [
        stops[request_id][(position + i) % len(stops[request_id])] for i in range(count)
    ]


@at_both_lags
def test_a_stop_id_anywhere_in_an_accepted_block_ends_the_request_there(lag: int) -> None:
    """Every place of a block, and every budget that ends before, at, and behind the stop."""
    free = plain_rig().run([request("free", PROMPT, 24)]).ids["free"]
    places = [j for j in range(1, 20) if free[j] not in free[:j]]
    assert len(places) >= 9, "the text repeats itself too much for this test"
    submits, expected = [], {}
    for j in places:
        for budget in (j, j + 1, j + 2, 24):
            request_id = f"stop at {j}, budget {budget}"
            submits.append(request(request_id, PROMPT, budget, stop_token_ids=(free[j],), logprobs=0))
            stopped = budget >= j + 1
            expected[request_id] = (free[: min(j + 1, budget)], "stop_token" if stopped else "length")
    drafter = ScriptedDrafter(always_right({s.request_id: PROMPT + free for s in submits}))
    run = drafting_rig().run(submits, drafter=drafter, num_slots=16, lag=lag)
    for request_id, (ids, finish) in expected.items():
        result = run.results[request_id]
        assert (result.ids, result.last.finish) == (ids, finish), request_id
        assert [entry.token_id for entry in gather(result, "logprobs")] == ids
        assert result.last.matched_stop_id == (ids[-1] if finish == "stop_token" else None)


@at_both_lags
def test_stop_ids_before_min_tokens_are_neither_emitted_nor_accepted(lag: int) -> None:
    stops = tuple(range(0, VOCAB_SIZE, 3))
    submits = [request(f"r{m}", PROMPT, 20, stop_token_ids=stops, min_tokens=m) for m in (0, 1, 5, 12)]
    plain = plain_rig().run(submits)
    for script in (stop_ids_of(submits, {}), always_right(plain_texts(submits, plain.ids))):
        run = drafting_rig().run(submits, drafter=ScriptedDrafter(script), lag=lag)
        assert_same_results(run, plain)
    for submit in submits:
        assert not set(plain.ids[submit.request_id][: submit.params.min_tokens]) & set(stops)


def counted(rounds: list[Round], run: Run, submit: Submit) -> SpeculationCounters:
    """Counters from a drafter's own account: drafts that were accepted and not cut off by the ending. A round that
    was in flight when the request ended counts for nothing.
    """
    end = len(submit.prompt_ids) + len(run.ids[submit.request_id])
    own = [r for r in rounds if r.request_id == submit.request_id and r.start + 1 < end]
    kept = [min(r.num_accepted, end - (r.start + 1)) for r in own]
    widest = max((len(r.drafts) for r in own), default=0)
    return SpeculationCounters(
        rounds=len(own),
        drafted=sum(len(r.drafts) for r in own),
        accepted=sum(kept),
        accepted_per_position=[sum(n > position for n in kept) for position in range(widest)],
    )


@at_both_lags
@pytest.mark.parametrize("seed", range(2))
def test_counters_are_those_of_the_drafters_own_account(seed: int, lag: int) -> None:
    submits = random_endings(10 + seed, 36)
    plain = plain_rig().run(submits, max_model_len=72)
    texts = longest_texts(submits, plain)
    drafter = ScriptedDrafter(in_turn(always_right(texts), randomly_right(texts, VOCAB_SIZE)))
    run = drafting_rig().run(submits, drafter=drafter, max_model_len=72, lag=lag)
    assert lag == 1 or all(r.start + 1 < len(texts[r.request_id]) for r in drafter.rounds)
    found = [run.results[s.request_id].last.speculation for s in submits]
    assert found == [counted(drafter.rounds, run, s) for s in submits]
    whole = run.speculation
    for field in ("rounds", "drafted", "accepted"):
        assert getattr(whole, field) == sum(getattr(c, field) for c in found)
    assert sum(whole.accepted_per_position) == whole.accepted


@at_both_lags
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("num_right", [0, 1, 2, 8])
def test_acceptance_is_exactly_what_the_drafter_got_right(k: int, num_right: int, lag: int) -> None:
    """From a text of known length the number of rounds, and of steps, follows."""
    num_tokens = 25
    submit = request("a", PROMPT, num_tokens, num_draft_tokens=k)
    texts = plain_texts([submit], plain_rig().run([submit]).ids)
    drafter = ScriptedDrafter(right_until(texts, VOCAB_SIZE, num_right))
    run = drafting_rig().run([submit], drafter=drafter, lag=lag)
    expected: list[tuple[int, int]] = []
    generated = 1  # by the prompt's own step
    while generated < num_tokens:
        drafted = min(k, num_tokens - generated - 1)
        accepted = min(drafted, num_right)
        expected += [(drafted, accepted)] if drafted else []
        generated += accepted + 1
    counters = run.results["a"].last.speculation
    assert counters == run.speculation
    assert counters is not None
    assert counters.rounds == len(expected)
    assert (counters.drafted, counters.accepted) == tuple(map(sum, zip(*expected, strict=True)))
    widest = max(drafted for drafted, _ in expected)
    assert counters.accepted_per_position == [sum(a > p for _, a in expected) for p in range(widest)]
    assert [(len(r.drafts), r.num_accepted) for r in drafter.rounds] == expected


def test_requests_of_one_batch_draft_as_they_asked() -> None:
    submits = [request(f"k{k}", PROMPT, 20, num_draft_tokens=k) for k in (0, 1, 5, 8)]
    submits.append(request("unset", PROMPT, 20))
    texts = plain_texts(submits, plain_rig().run(submits).ids)
    drafter = ScriptedDrafter(always_right(texts))
    run = drafting_rig().run(submits, drafter=drafter)
    most = {
        request_id: max((len(r.drafts) for r in drafter.rounds if r.request_id == request_id), default=0)
        for request_id in texts
    }
    assert most == {"k0": 0, "k1": 1, "k5": 5, "k8": 8, "unset": 8}
    assert run.results["k0"].last.speculation == SpeculationCounters()


@at_both_lags
def test_drafts_are_cut_to_the_room_left(lag: int) -> None:
    """Near the context limit and the budget, a round drafts no more than could be emitted: with lag 1 the host grants
    more, and the device cuts.
    """
    submits = [request("limit", PROMPT, 1000), request("budget", PROMPT, 11)]
    plain = plain_rig().run(submits, max_model_len=32)
    drafter = ScriptedDrafter(always_wrong(plain_texts(submits, plain.ids), VOCAB_SIZE))
    run = drafting_rig().run(submits, drafter=drafter, max_model_len=32, lag=lag)
    assert_same_results(run, plain)
    ends = {"limit": 32, "budget": len(PROMPT) + 11}
    for r in drafter.rounds:
        assert r.start + 1 + len(r.drafts) <= ends[r.request_id] - 1
    assert {len(r.drafts) for r in drafter.rounds} == set(range(1, NUM_DRAFT_TOKENS + 1))


def test_a_cut_off_request_leaves_no_pages_behind() -> None:
    """`LeadPlanner` checks the pool when it falls idle; here stops come inside blocks, for many at once."""
    submits = random_endings(77, 30)
    texts = longest_texts(submits, plain_rig().run(submits))
    run: Any = drafting_rig().run(submits, drafter=ScriptedDrafter(always_right(texts)), num_slots=6)
    assert all(result.last.finish for result in run.results.values())
