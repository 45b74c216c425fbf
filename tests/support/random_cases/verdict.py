"""What a case must give, by plain decoding, and where what it gave differs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from gemray_workers.config import KVDTypeName, NumericsName
from gemray_workers.messages import EngineStats, SequenceDelta, Submit
from gemray_workers.sampling.token_logprob import TokenLogprob
from support.engine.speculation_rig import solo_rig
from support.oracles.plain_loop import PlainText, plain_text
from support.random_cases.case import MAX_MODEL_LEN, MAX_TOKENS, Case, original
from support.random_cases.serving import Job, Served

TOLERANCE: Mapping[NumericsName, float] = {"fast": 1e-9, "exact": 0.0}
"""Error of a log-probability: another batch sums in another order, unless numerics are exact."""
BEYOND = 4
"""Tokens behind its budget for which a request's text is known: what a drafter gets right there must not count."""
SHORT = 5 + BEYOND
"""Tokens of a text that is decoded no further, as three of four requests need no more: plain decoding takes longer than
what it is held against."""


@dataclass(frozen=True)
class Expected:
    """What one request must get."""

    text: PlainText
    finish: str
    free_ids: list[int]
    """How the text would go on behind a stop id, as far as it is known."""


def prepare(case: Case) -> tuple[Job, Mapping[str, Expected]]:
    """The case's job, and what its requests must get."""
    expected = {submit.request_id: _expected(case, submit) for submit in case.submits}
    texts = {s.request_id: [*s.prompt_ids, *expected[s.request_id].free_ids] for s in case.submits}
    return Job(case, case.directory, case.drafter_path, case.second_drafter_path, texts), expected


def _expected(case: Case, submit: Submit) -> Expected:
    """The original's text, cut at the budget and behind the first stop id."""
    params = submit.params
    most = min(params.max_tokens, case.limits.max_model_len - len(submit.prompt_ids))
    length = SHORT if most + BEYOND <= SHORT else MAX_TOKENS
    free = free_text(case.directory, case.originals[submit.request_id], case.kv_dtype, case.numerics, length)
    budget = free.ids[:most]
    stop = next(
        (i for i, token in enumerate(budget, 1) if token in params.stop_token_ids and i > params.min_tokens), None
    )
    end = len(budget) if stop is None else stop
    text = PlainText(free.ids[:end], free.logprobs[:end], free.prompt_logprobs)
    return Expected(text, "length" if stop is None else "stop_token", free.ids)


@functools.cache
def free_text(
    directory: Path, number: int, kv_dtype: KVDTypeName, numerics: NumericsName, num_tokens: int
) -> PlainText:
    """Plain decoding of an original; in exact numerics what the engine gives it alone, whose bits are the question."""
    submit = original(number)
    submit = msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, max_tokens=num_tokens))
    if numerics == "exact":
        return _alone(directory, submit, kv_dtype)
    return plain_text(directory, submit, max_model_len=MAX_MODEL_LEN, kv_dtype=kv_dtype)


def _alone(directory: Path, submit: Submit, kv_dtype: KVDTypeName) -> PlainText:
    """Without a drafter, beside nothing, its prompt whole."""
    params = msgspec.structs.replace(submit.params, logprobs=0, prompt_logprobs=0)
    rig = solo_rig(directory, dtype=torch.float32, kv_dtype=kv_dtype, numerics="exact")
    run = rig.run(
        [msgspec.structs.replace(submit, params=params)],
        prefill_chunk=MAX_MODEL_LEN,
        max_step_tokens=MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        lag=0,
        prefix_cache=False,
    )
    result = run.results[submit.request_id]
    return PlainText(
        result.ids,
        [entry.logprob for delta in result.deltas for entry in delta.logprobs or ()],
        [entry.logprob for delta in result.deltas for entry in delta.prompt_logprobs or ()],
    )


def differences(case: Case, expected: Mapping[str, Expected], served: Served) -> list[str]:
    """One sentence for each difference from plain decoding, and for each count that does not add up."""
    deltas = [delta for life in served.lives for delta in life.deltas]
    found = [f"{name} got tokens after it was cancelled" for name in served.leaked]
    for submit in case.submits:
        own = [delta for delta in deltas if delta.request_id == submit.request_id]
        cancelled = submit.request_id in served.cancelled
        found += _of_request(submit, expected[submit.request_id], own, cancelled, TOLERANCE[case.numerics])
    for life in served.lives:
        found += _of_counters(life.deltas, life.stats)
    return found


def _of_request(
    submit: Submit, expected: Expected, deltas: Sequence[SequenceDelta], cancelled: bool, tolerance: float
) -> Iterator[str]:
    name, text, last = submit.request_id, expected.text, deltas[-1]
    ids = [token for delta in deltas for token in delta.token_ids]
    if cancelled and last.finish == "cancelled":
        if ids != text.ids[: len(ids)]:
            yield f"{name} was cancelled with {ids}, plain decoding begins with {text.ids}"
    elif (ids, last.finish) != (text.ids, expected.finish):
        yield f"{name} got {ids} ({last.finish}, {last.fault}), plain decoding {text.ids} ({expected.finish})"
    elif last.matched_stop_id != (ids[-1] if expected.finish == "stop_token" else None):
        yield f"{name} ended by stop id {last.matched_stop_id} with {ids}"
    if submit.params.logprobs is not None:
        entries = [entry for delta in deltas for entry in delta.logprobs or []]
        yield from _of_logprobs(f"{name}'s log-probabilities", entries, ids, text.logprobs[: len(ids)], tolerance)
    if submit.params.prompt_logprobs is not None and ids:
        entries = [entry for delta in deltas for entry in delta.prompt_logprobs or []]
        yield from _of_logprobs(f"{name}'s prompt", entries, submit.prompt_ids[1:], text.prompt_logprobs, tolerance)


def _of_logprobs(
    what: str, entries: Sequence[TokenLogprob], ids: Sequence[int], logprobs: Sequence[float], tolerance: float
) -> Iterator[str]:
    if [entry.token_id for entry in entries] != list(ids):
        yield f"{what} are of {[entry.token_id for entry in entries]}, not of {list(ids)}"
    elif any(abs(e.logprob - value) > tolerance for e, value in zip(entries, logprobs, strict=True)):
        yield f"{what} are {[e.logprob for e in entries]}, not {list(logprobs)}"


def _of_counters(deltas: Sequence[SequenceDelta], stats: EngineStats) -> Iterator[str]:
    generated = sum(len(delta.token_ids) for delta in deltas)
    if stats.generated_tokens != generated:
        yield f"{stats.generated_tokens} tokens are counted, {generated} were given out"
    ends = [delta.speculation for delta in deltas if delta.finish is not None and delta.speculation is not None]
    for name in ("rounds", "drafted", "accepted"):
        total = sum(getattr(counters, name) for counters in ends)
        if getattr(stats.speculation, name) != total:
            yield f"{getattr(stats.speculation, name)} {name} are counted, requests have {total}"
    if any(stats.pages_in_use.values()) or stats.num_running or stats.num_waiting:
        yield f"left behind: pages {stats.pages_in_use}, {stats.num_running} running, {stats.num_waiting} waiting"
