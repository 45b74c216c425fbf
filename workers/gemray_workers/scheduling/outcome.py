"""What one sequence's rows gave, applied to it: lengths move, the ending is found, a delta tells the client.

A sequence ends inside the tokens of one step where the earliest of its endings is; nothing follows it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

import msgspec

from gemray_workers.grammar.run import GrammarRun
from gemray_workers.messages import FinishReason, SequenceDelta, Submit
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.token_logprob import TokenLogprob
from gemray_workers.scheduling.plan import ScheduledRows
from gemray_workers.scheduling.request import Sequence


class SequenceOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What one sequence's sampled rows gave: accepted drafts, then one token of the target's own."""

    slot: int
    token_ids: list[int]
    """The accepted drafts, and one more unless there is a `fault`; empty when only a prompt chunk ran."""
    num_accepted: int = 0
    num_drafts: int = 0
    """Drafts that were verified: those of the plan, less what the sequence had no room for."""
    logprobs: list[TokenLogprob] | None = None
    """One per token id when the request wants them."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One per prompt position that this step covered."""
    fault: str | None = None
    """Why this sequence cannot go on (e.g. NaN logits); its request ends with INTERNAL."""


def apply_outcome(
    sequence: Sequence, rows: ScheduledRows, outcome: SequenceOutcome, max_model_len: int
) -> SequenceDelta | None:
    """Move `sequence` past its oldest rows in flight. Returns what the client learns, or None; with `finish` the
    sequence has ended.
    """
    _check_outcome(rows, outcome)
    assert sequence.in_flight.pop(0) is rows, f"slot {rows.slot}: {rows} are not the oldest in flight"
    _count_prompt_logprobs(sequence, rows, outcome)
    trimmed = trim(
        outcome.token_ids,
        num_generated=sequence.num_generated,
        num_tokens=len(sequence.tokens),
        params=sequence.params,
        max_model_len=max_model_len,
    )
    if sequence.grammar is not None:
        trimmed = complete(trimmed, outcome.token_ids, sequence.grammar)
    kept_ids = outcome.token_ids[: trimmed.num_kept]
    finish: FinishReason | None = trimmed.finish
    fault: str | None = None
    if finish is None and outcome.fault is not None:
        finish, fault = _why_faulty(sequence, kept_ids, outcome.fault)

    sequence.tokens.extend(kept_ids)
    sequence.num_computed += rows.num_known + outcome.num_accepted
    sequence.speculation.record(
        drafted=outcome.num_drafts, accepted=min(outcome.num_accepted, trimmed.num_kept), drafter=rows.drafter
    )
    if finish is None:
        sequence.check()
    if not kept_ids and finish is None and not outcome.prompt_logprobs:
        return None
    return SequenceDelta(
        request_id=sequence.request_id,
        token_ids=kept_ids,
        logprobs=None if outcome.logprobs is None else outcome.logprobs[: trimmed.num_kept],
        prompt_logprobs=outcome.prompt_logprobs or None,
        finish=finish,
        matched_stop_id=trimmed.matched_stop_id,
        fault=fault,
        cached_tokens=sequence.num_cached or 0,
        speculation=sequence.speculation.counters(),
    )


def _why_faulty(sequence: Sequence, new_ids: list[int], fault: str) -> tuple[FinishReason, str]:
    """Whether the request asked for what can't be, or the model gave no usable logits."""
    grammar, params = sequence.grammar, sequence.params
    early = params.stop_token_ids if sequence.num_generated + len(new_ids) < params.min_tokens else ()
    banned = {*params.suppress_tokens, *early}
    if sequence.bad_words is not None:
        banned |= sequence.bad_words.forbidden([*sequence.tokens[sequence.prompt_len :], *new_ids])
    if grammar is not None:
        why = grammar.why_stuck(allowed=params.allowed_token_ids, banned=banned)
    else:
        is_stuck = sequence.bad_words is not None and banned.issuperset(params.allowed_token_ids or (None,))
        why = "every token that the request's other fields allow here would complete a bad word" if is_stuck else None
    return ("fault", fault) if why is None else ("unmet", why)


def _count_prompt_logprobs(sequence: Sequence, rows: ScheduledRows, outcome: SequenceOutcome) -> None:
    """They go out with the delta of this step: after a preemption they are not asked for again."""
    if rows.prompt_logprobs_from is None or outcome.prompt_logprobs is None:
        return
    sequence.next_prompt_logprob = rows.prompt_logprobs_from + len(outcome.prompt_logprobs)


def _check_outcome(rows: ScheduledRows, outcome: SequenceOutcome) -> None:
    """The engine answers what the plan asked."""
    assert outcome.num_accepted <= outcome.num_drafts <= rows.num_drafts, f"slot {rows.slot}: {outcome} for {rows}"
    if rows.samples or outcome.fault is None:
        expected = outcome.num_accepted + (outcome.fault is None) if rows.samples else 0
        assert len(outcome.token_ids) == expected, f"slot {rows.slot}: {outcome} should have {expected} token ids"
    if outcome.logprobs is not None:
        assert len(outcome.logprobs) == len(outcome.token_ids), f"slot {rows.slot}: one logprob a token id, {outcome}"


@dataclass(frozen=True)
class TrimmedTokens:
    """How many of the new tokens stay, and why the sequence ends there, if it does."""

    num_kept: int
    finish: Literal["stop_token", "grammar", "length"] | None = None
    matched_stop_id: int | None = None


def trim(
    token_ids: SequenceOf[int],
    *,
    num_generated: int,
    num_tokens: int,
    params: SamplingParams,
    max_model_len: int,
) -> TrimmedTokens:
    """Find the first of: a stop id once `min_tokens` were generated, the `max_tokens`-th generated token, the
    `max_model_len`-th token. A stop id that uses up the budget is a stop. The token that ends the sequence stays.

    Args:
        token_ids: this step's new tokens: accepted drafts and one more.
        num_generated: tokens generated before them.
        num_tokens: tokens of the sequence before them, prompt included.
    """
    room = min(params.max_tokens - num_generated, max_model_len - num_tokens)
    for index, token_id in enumerate(token_ids[: max(room, 0)]):
        if token_id in params.stop_token_ids and num_generated + index >= params.min_tokens:
            return TrimmedTokens(index + 1, "stop_token", token_id)
    if len(token_ids) >= room:
        return TrimmedTokens(max(room, 0), "length")
    return TrimmedTokens(len(token_ids))


def complete(trimmed: TrimmedTokens, token_ids: SequenceOf[int], grammar: GrammarRun) -> TrimmedTokens:
    """Let the grammar take what `trim` left: the text ends where nothing can follow, if that comes first. With the last
    token of the budget it is complete and not cut."""
    is_stop = trimmed.finish == "stop_token"
    num_taken = grammar.take(token_ids[: trimmed.num_kept - is_stop])
    return trimmed if num_taken is None else TrimmedTokens(num_taken, "grammar")


def trim_replayed(submit: Submit, max_model_len: int) -> TrimmedTokens:
    """Whether the replayed tokens had already reached the end of the request, of which the client was not told."""
    return trim(
        submit.emitted_ids,
        num_generated=0,
        num_tokens=len(submit.prompt_ids),
        params=submit.params,
        max_model_len=max_model_len,
    )


def why_not_replayed(submit: Submit, trimmed: TrimmedTokens, grammar: GrammarRun) -> str | None:
    """Why the grammar cannot have led to the replayed tokens, for the client; None when it can. `trimmed` is what
    `trim_replayed` found: the stop token that ended them is no part of the form."""
    given = submit.emitted_ids[: trimmed.num_kept - (trimmed.finish == "stop_token")]
    place = grammar.num_allowed(given)
    if place == len(given):
        return None
    return f"it does not allow emitted token id {given[place]} at place {place}, so no earlier call can have given that"
