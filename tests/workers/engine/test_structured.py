"""Answers that follow a grammar: valid, with equal ids whatever drafts, batches, ranks, preemptions and replays do."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.grammar.grammar import Grammar, Thought
from gemray_workers.messages import Cancel, StepOutput, Stop, Submit, ToGang
from support.engine.engine_runner import Run, engine_config, request, run_engine
from support.engine.held_out_requests import held_out_requests
from support.engine.random_requests import scarce_pages
from support.engine.speculation_rig import Rig, solo_rig
from support.processes.gang import RunOnGang
from support.structured.schemas import schemas
from support.structured.sweep import DRAFTERS, STOP_IDS, is_valid, judge, requests_of, serve

TARGET = embedded_path("gemray-tiny")
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "sort": {"enum": ["漢字", "b"]}, "tall": {"type": "boolean"}},
    "required": ["name", "sort", "tall"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar(kind="json_schema", text=json.dumps(PERSON)),
    "choice": Grammar(kind="choice", text='["yes", "no", "yesterday"]'),
    "regex": Grammar(kind="regex", text="[0-9]{3}-[a-z]{4}"),
    "lark": Grammar(kind="lark", text='start: <[48]> "call:" /[a-z]{1,4}/ "{" <[52]> /[a-z ]{0,6}/ <[52]> "}" <[49]>'),
    "none": None,
}
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_directory(TARGET)


def rig_of(drafter: EmbeddedName | None) -> Rig:
    return solo_rig(TARGET, drafter_path=None if drafter is None else embedded_path(drafter))


@functools.cache
def mixed() -> tuple[Submit, ...]:
    """Every kind of grammar beside a request without one, greedy and drawn."""
    prompts = held_out_requests(8, 1, longest_prompt=24)
    samplers: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 64, "logprobs": 2})
    return tuple(
        request(
            f"{name} {number}",
            prompts[number].prompt_ids,
            MAX_TOKENS,
            grammar=grammar,
            stop_token_ids=STOP_IDS,
            seed=3,
            **sampler,
        )
        for name, grammar in GRAMMARS.items()
        for number, sampler in enumerate(samplers)
    )


@functools.cache
def plain() -> Run:
    return rig_of(None).run(list(mixed()))


def run_alone(submit: Submit, **limits: Any) -> tuple[list[int], str | None, str | None]:
    run = rig_of(None).run([submit], **limits)
    (result,) = run.results.values()
    return result.ids, result.last.finish, result.last.fault


def test_answers_have_the_form_that_was_asked_for(tokenizer: ChatTokenizer) -> None:
    run = plain()
    for name, result in run.results.items():
        text = tokenizer.decode([t for t in result.ids if t not in STOP_IDS])
        match name.split()[0]:
            case "schema":
                assert is_valid(text, PERSON)
            case "choice":
                assert text in ("yes", "no", "yesterday")
            case "regex":
                assert re.fullmatch("[0-9]{3}-[a-z]{4}", text)
            case "lark":
                assert (result.ids[0], result.ids[-1]) == (48, 49)
        assert result.last.finish in ("grammar", "stop_token") or name.startswith("none")
        assert result.last.finish == "grammar" or not name.startswith(("regex", "lark"))


@pytest.mark.parametrize("drafter", ["gemray-tiny-assistant", "gemray-tiny-dflash"])
def test_ids_are_those_without_drafts(drafter: EmbeddedName) -> None:
    run = rig_of(drafter).run(list(mixed()))
    assert run.ids == plain().ids
    assert {n: r.last.finish for n, r in run.results.items()} == {n: r.last.finish for n, r in plain().results.items()}
    constrained = [r.last.speculation for name, r in run.results.items() if not name.startswith("none")]
    assert sum(s.accepted for s in constrained if s is not None) > 0, "no draft was accepted under a grammar"
    for name, result in run.results.items():
        wanted = plain().results[name]
        drawn = [entry.token_id for delta in result.deltas for entry in delta.logprobs or []]
        assert drawn == [entry.token_id for delta in wanted.deltas for entry in delta.logprobs or []]


@functools.cache
def partly_held() -> tuple[Submit, int, tuple[int, ...]]:
    """A request of which a part is held wherever its answer comes to a certain id, that id, and what must follow."""
    free = mixed()[-1]
    begins_at, *_, first, second = dict.fromkeys(run_alone(free)[0][2:])
    text = f"start: <[{begins_at}]> <[{first}]> <[{second}]> <[{first}]>"
    params = msgspec.structs.replace(free.params, grammar=Grammar(kind="lark", text=text, begins_at=begins_at))
    return msgspec.structs.replace(free, params=params), begins_at, (first, second, first)


@pytest.mark.parametrize("drafter", [None, "gemray-tiny-assistant", "gemray-tiny-dflash"])
def test_a_part_of_an_answer_is_held(drafter: EmbeddedName | None) -> None:
    submit, begins_at, held = partly_held()
    (ids,) = rig_of(drafter).run([submit]).ids.values()
    assert ids == run_alone(submit)[0]
    place = ids.index(begins_at)
    assert tuple(ids[place + 1 : place + 4]) == held
    free, *_ = run_alone(mixed()[-1])
    assert ids[: place + 1] == free[: place + 1]
    assert len(ids) > place + 4, "the answer goes on behind it"


def test_a_request_without_a_grammar_is_not_changed_by_those_beside_it() -> None:
    for submit in mixed()[-2:]:
        assert run_alone(submit)[0] == plain().ids[submit.request_id]


def test_a_preempted_answer_goes_on_in_its_grammar() -> None:
    rig = rig_of("gemray-tiny-assistant")
    run = rig.run(list(mixed()), **scarce_pages(0, rig))
    assert run.preemptions > 0
    assert run.ids == plain().ids


@pytest.mark.parametrize("kept", [1, 5, None])
def test_a_replayed_answer_goes_on_in_its_grammar(kept: int | None) -> None:
    """After any number of tokens; after all of them nothing but the end is told."""
    submits = [
        msgspec.structs.replace(submit, emitted_ids=plain().ids[submit.request_id][:kept])
        for submit in mixed()
        if submit.params.grammar is not None
    ]
    run = rig_of(None).run(submits)
    for submit in submits:
        name = submit.request_id
        assert run.ids[name] == plain().ids[name][len(submit.emitted_ids) :]
        assert run.results[name].last.finish == plain().results[name].last.finish


@pytest.mark.parametrize(
    ("given", "place"), [("7x", 1), ("x", 0), ("123-abcd1", 8)], ids=["within", "at first", "behind the end"]
)
def test_emitted_ids_that_the_form_forbids_end_the_request(given: str, place: int, tokenizer: ChatTokenizer) -> None:
    """No earlier call can have given them, and what went on behind them would not have the form."""
    ids = [tokenizer.encode(character)[1] for character in given]
    submit = request("a", mixed()[0].prompt_ids, 20, grammar=GRAMMARS["regex"], stop_token_ids=STOP_IDS)
    run = rig_of(None).run([msgspec.structs.replace(submit, emitted_ids=ids)])
    last = run.results["a"].last
    assert (run.ids["a"], last.finish) == ([], "unmet")
    assert f"emitted token id {ids[place]} at place {place}" in str(last.fault)


def test_a_budget_that_ends_with_the_form_is_no_cut() -> None:
    regex = mixed()[4]
    length = len(plain().ids[regex.request_id])
    for budget, finish in ((length, "grammar"), (length - 1, "length")):
        params = msgspec.structs.replace(regex.params, max_tokens=budget)
        ids, ended, _ = run_alone(msgspec.structs.replace(regex, params=params))
        assert (ids, ended) == (plain().ids[regex.request_id][:budget], finish)


def test_the_form_ends_a_text_whatever_min_tokens_says(tokenizer: ChatTokenizer) -> None:
    prompt = mixed()[0].prompt_ids
    for stops in (STOP_IDS, ()):
        submit = request(
            "a", prompt, 40, grammar=GRAMMARS["regex"], min_tokens=30, stop_token_ids=stops, temperature=1.0, top_k=0
        )
        ids, finish, _ = run_alone(submit)
        assert finish == "grammar"
        assert len(tokenizer.decode(ids)) == 8
    # Where more may follow, a stop id has to wait: digits go on until then.
    number = Grammar(kind="regex", text="[0-9]+")
    ids, finish, _ = run_alone(request("a", prompt, 12, grammar=number, min_tokens=9, stop_token_ids=STOP_IDS))
    assert len(ids) > 9 or finish == "length"
    assert tokenizer.decode(ids[:9]).isdigit()


def test_bias_and_forbidden_ids_hold_beside_a_grammar(tokenizer: ChatTokenizer) -> None:
    prompt = mixed()[0].prompt_ids
    choice = GRAMMARS["choice"]
    no = tokenizer.encode("no")[1]
    assert tokenizer.bytes_of(no) == b"no"
    assert run_alone(request("a", prompt, 9, grammar=choice, logit_bias={no: 100.0}))[0] == [no]
    n = [t for t in range(tokenizer.vocab_size) if tokenizer.bytes_of(t)[:1] == b"n"]
    submit = request("a", prompt, 9, grammar=choice, suppress_tokens=tuple(n), stop_token_ids=STOP_IDS)
    ids, _, _ = run_alone(submit)
    assert tokenizer.decode(ids).startswith("yes")


@pytest.mark.parametrize("drafter", [None, "gemray-tiny-assistant"])
def test_where_nothing_is_left_to_choose_the_request_is_at_fault(
    drafter: EmbeddedName | None, tokenizer: ChatTokenizer
) -> None:
    y = tuple(t for t in range(tokenizer.vocab_size) if tokenizer.bytes_of(t) in (b"y", b"ye"))
    submit = request("a", mixed()[0].prompt_ids, 9, grammar=GRAMMARS["choice"], allowed_token_ids=y)
    beside = mixed()[-1]
    run = rig_of(drafter).run([submit, beside])
    last = run.results["a"].last
    assert last.finish == "unmet"
    assert "other fields" in str(last.fault)
    assert tokenizer.decode(run.ids["a"]) in ("y", "ye")
    assert run.ids[beside.request_id] == plain().ids[beside.request_id]


def test_a_thought_comes_before_the_form(tokenizer: ChatTokenizer) -> None:
    """The thought is open; its end is made likely, behind which only the form is allowed."""
    grammar = Grammar(kind="choice", text='["yes", "no"]', thought=Thought(opens=100, closes=101))
    submit = request("a", mixed()[0].prompt_ids, 40, grammar=grammar, logit_bias={101: 100.0}, stop_token_ids=STOP_IDS)
    submit = msgspec.structs.replace(submit, emitted_ids=[100])
    runs = {drafter: rig_of(name).run([submit]).ids["a"] for drafter, name in DRAFTERS.items()}
    ids = runs["none"]
    assert ids[0] == 101
    assert tokenizer.decode([t for t in ids[1:] if t not in STOP_IDS]) in ("yes", "no")
    assert runs["MTP"] == runs["DFlash"] == ids


def test_a_grammar_without_a_vocabulary_ends_its_request_alone() -> None:
    rig = solo_rig(TARGET)
    vocabulary, rig.vocabulary = rig.vocabulary, None
    try:
        run = rig.run([mixed()[0], mixed()[-1]])
    finally:
        rig.vocabulary = vocabulary
    assert run.results[mixed()[0].request_id].last.finish == "fault"
    assert run.ids[mixed()[-1].request_id] == plain().ids[mixed()[-1].request_id]


class _CancelsAtOnce(LocalInbox):
    """Cancels a request in the message behind it, when its grammar is not compiled yet."""

    def __init__(self, submit: Submit) -> None:
        super().__init__([submit])
        self._request_id = submit.request_id

    def poll(self, timeout_s: float) -> list[ToGang]:
        arrived = super().poll(timeout_s)
        return [*arrived, Cancel(self._request_id)] if arrived and not isinstance(arrived[0], Stop) else arrived


def test_a_request_is_cancelled_while_its_grammar_is_compiled() -> None:
    inbox = _CancelsAtOnce(mixed()[0])
    rig_of(None).engine(inbox).run()
    assert inbox.last(mixed()[0].request_id).finish == "cancelled"
    assert all(isinstance(step, StepOutput) and step.stats.num_running == 0 for step in inbox.steps)


def test_two_ranks_give_the_same_ids(run_on_gang: RunOnGang) -> None:
    config = engine_config(
        TARGET, tensor_parallel_size=2, drafter_path=str(embedded_path("gemray-tiny-assistant")), max_num_seqs=16,
        max_step_tokens=128,
    )  # fmt: skip
    run = run_on_gang(2, run_engine, config, list(mixed()))[0]
    assert run is not None
    assert run.ids == plain().ids


def every_thirtieth(named: dict[str, Any]) -> dict[str, Any]:
    return {name: schema for index, (name, schema) in enumerate(named.items()) if index % 30 == 4}


@functools.cache
def _sweep(drafter: str) -> tuple[Sequence[Submit], Run]:
    submits = requests_of(every_thirtieth(schemas()), [1.0])
    return submits, serve(drafter, submits)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_part_of_the_sweep(drafter: str, tokenizer: ChatTokenizer) -> None:
    """`python -m support.structured` runs all of it."""
    submits, run = _sweep(drafter)
    verdict = judge(drafter, submits, run, _sweep("none")[1], tokenizer)
    assert verdict.wrong == verdict.differing == ()
    assert verdict.valid > len(submits) // 2, verdict.cut  # a form without bounds may fill its budget
