"""Who may enter: from a submitted request to a sequence, and how many of the waiting ones can start now."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice

from gemray_workers.errors import InvalidField
from gemray_workers.messages import Submit
from gemray_workers.scheduling.config import SchedulerConfig
from gemray_workers.scheduling.page_ledger import PageLedger
from gemray_workers.scheduling.request import Sequence
from gemray_workers.scheduling.stopping import TrimmedTokens, trim

MOST_LOOKED_AT = 256
"""Waiting sequences that are looked at in one step, from the oldest on: a bound on the host's work."""


def sequence_of(submit: Submit, *, arrival: int, max_model_len: int) -> Sequence:
    """The sequence of a request. Replayed tokens count as generated, and prompt log-probabilities that the client has
    are not given again.

    Raises:
        InvalidField: the prompt is empty or leaves no room for a token.
    """
    prompt_len = len(submit.prompt_ids)
    if prompt_len == 0:
        raise InvalidField("prompt_ids", submit.prompt_ids, "at least one token")
    if prompt_len >= max_model_len:
        raise InvalidField(
            "prompt_ids",
            f"{prompt_len} tokens",
            f"at most {max_model_len - 1} tokens: prompt and output together are at most {max_model_len}",
        )
    return Sequence(
        request_id=submit.request_id,
        params=submit.params,
        tokens=[*submit.prompt_ids, *submit.emitted_ids],
        prompt_len=prompt_len,
        arrival=arrival,
        next_prompt_logprob=1 + submit.num_prompt_logprobs,
    )


def trim_replayed(submit: Submit, max_model_len: int) -> TrimmedTokens:
    """Whether the replayed tokens had already reached the end of the request, of which the client was not told."""
    return trim(
        submit.emitted_ids,
        num_generated=0,
        num_tokens=len(submit.prompt_ids),
        params=submit.params,
        max_model_len=max_model_len,
    )


@dataclass(frozen=True)
class AdmissionDecision:
    """Who changes places before a step."""

    giving_way: SequenceOf[Sequence]
    """Running ones that go back to the waiting, newest first."""
    admitted: SequenceOf[Sequence]
    """Waiting ones that start, oldest first."""


def choose_admissions(
    waiting: SequenceOf[Sequence],
    running: SequenceOf[Sequence],
    ledger: PageLedger,
    config: SchedulerConfig,
    *,
    num_free_slots: int,
) -> AdmissionDecision:
    """Who finds a slot and pages: each that starts and each that runs must be able to compute all it knows and a little
    more.

    The oldest that waits claims what the running ones younger than it hold, newest first, if with that it can start:
    it waits for older ones alone. Behind it others start on what is idle, so a short request does not wait for a long
    one to find its pages; those are the younger ones that may have to give way, and come back with their tokens.

    When nothing older runs the oldest does start, since an accepted request fits alone. The pages that a running
    sequence needs in this step are part of what it knows, so an admission never makes a preemption necessary in the
    same step.
    """
    if not waiting:
        return AdmissionDecision([], [])
    missing = {id(sequence): _missing(sequence, ledger, config) for sequence in running}
    unclaimed = ledger.pages_free
    for pages in missing.values():
        unclaimed = _less(unclaimed, pages)
    oldest, giving_way = waiting[0], list[Sequence]()
    most = min(num_free_slots, config.max_step_tokens - len(running))
    if not _fits(oldest, unclaimed, most, ledger, config):
        pages, num_places = unclaimed, most
        for sequence in sorted(running, key=lambda sequence: -sequence.arrival):
            if sequence.arrival < oldest.arrival:
                break
            held = {name: len(held) for name, held in ledger.pages_of(sequence.running_slot).items()}
            pages = _plus(_plus(pages, missing[id(sequence)]), held)
            num_places += 1
            giving_way.append(sequence)
            if _fits(oldest, pages, num_places, ledger, config):
                unclaimed, most = pages, num_places
                break
        if unclaimed is not pages:
            giving_way.clear()  # all of them together are not enough
    admitted: list[Sequence] = []
    for sequence in islice(waiting, MOST_LOOKED_AT):
        if len(admitted) >= most or min(unclaimed.values()) <= 0:
            break
        if _fits(sequence, unclaimed, most - len(admitted), ledger, config):
            unclaimed = _less(unclaimed, _demand(sequence, ledger, config))
            admitted.append(sequence)
    return AdmissionDecision(giving_way, admitted)


def _missing(sequence: Sequence, ledger: PageLedger, config: SchedulerConfig) -> dict[str, int]:
    """Pages that a running sequence may yet take."""
    num_rows = sequence.num_rows_in_flight + config.chunk(sequence.num_pending)
    return ledger.still_missing(sequence.running_slot, _foreseen_len(sequence, config), num_rows)


def _demand(sequence: Sequence, ledger: PageLedger, config: SchedulerConfig) -> dict[str, int]:
    """Pages that a waiting sequence takes."""
    return ledger.demand(_foreseen_len(sequence, config), config.chunk(sequence.num_pending))


def _fits(
    sequence: Sequence, unclaimed: dict[str, int], num_places: int, ledger: PageLedger, config: SchedulerConfig
) -> bool:
    return num_places > 0 and min(_less(unclaimed, _demand(sequence, ledger, config)).values()) >= 0


def _foreseen_len(sequence: Sequence, config: SchedulerConfig) -> int:
    return min(sequence.most_len + config.admission_headroom, sequence.end_len(config.max_model_len))


def _plus(pages: dict[str, int], given: dict[str, int]) -> dict[str, int]:
    return {name: count + given[name] for name, count in pages.items()}


def _less(pages: dict[str, int], taken: dict[str, int]) -> dict[str, int]:
    return {name: count - taken[name] for name, count in pages.items()}
