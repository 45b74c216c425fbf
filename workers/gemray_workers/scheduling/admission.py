"""Who may enter: from a submitted request to a sequence, and how many of the waiting ones can start now."""

from __future__ import annotations

from collections.abc import Iterable

from gemray_workers.errors import InvalidField
from gemray_workers.messages import Submit
from gemray_workers.scheduling.config import SchedulerConfig
from gemray_workers.scheduling.page_ledger import PageLedger
from gemray_workers.scheduling.request import Sequence
from gemray_workers.scheduling.stopping import Ending, trim


def sequence_of(submit: Submit, *, arrival: int, max_model_len: int) -> Sequence:
    """The sequence of a request. Replayed tokens count as generated; whoever replays has their prompt
    log-probabilities already, because those go out with the first generated token.

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
        next_prompt_logprob=prompt_len if submit.emitted_ids else 1,
    )


def replayed_ending(submit: Submit, max_model_len: int) -> Ending:
    """Whether the replayed tokens had already reached the end of the request, of which the client was not told."""
    return trim(
        submit.emitted_ids,
        num_generated=0,
        num_tokens=len(submit.prompt_ids),
        params=submit.params,
        max_model_len=max_model_len,
    )


def count_admissible(
    waiting: Iterable[Sequence], running: Iterable[Sequence], ledger: PageLedger, config: SchedulerConfig
) -> int:
    """How many of the waiting, from the first on, find pages: each of them and of the running must be able to compute
    all it knows and a little more. Nobody overtakes, so the count ends at the first that does not.

    When nothing runs it is at least 1, since an accepted request fits alone. The pages that a running sequence needs
    in this step are part of what it knows, so an admission never makes a preemption necessary in the same step.
    """
    unclaimed = ledger.pages_free
    for sequence in running:
        missing = ledger.still_missing(
            sequence.running_slot,
            _foreseen_len(sequence, config),
            sequence.num_rows_in_flight + config.chunk(sequence.num_pending),
        )
        unclaimed = _less(unclaimed, missing)
    count = 0
    for sequence in waiting:
        demand = ledger.demand(_foreseen_len(sequence, config), config.chunk(sequence.num_pending))
        unclaimed = _less(unclaimed, demand)
        if min(unclaimed.values()) < 0:
            break
        count += 1
    return count


def _foreseen_len(sequence: Sequence, config: SchedulerConfig) -> int:
    return min(sequence.most_len + config.admission_headroom, sequence.end_len(config.max_model_len))


def _less(pages: dict[str, int], taken: dict[str, int]) -> dict[str, int]:
    return {name: count - taken[name] for name, count in pages.items()}
