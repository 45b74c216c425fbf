"""What one sequence's rows gave, applied to it: lengths move, the ending is found, a delta tells the client."""

from __future__ import annotations

from gemray_workers.messages import FinishReason, SequenceDelta
from gemray_workers.scheduling.plan import ScheduledRows, SequenceOutcome
from gemray_workers.scheduling.request import Sequence
from gemray_workers.scheduling.stopping import complete, trim


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
