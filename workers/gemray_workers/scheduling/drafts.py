"""How many drafts a sequence may have in a step: every limit of it, in one place."""

from __future__ import annotations

from typing import NamedTuple

from gemray_workers.scheduling.config import SchedulerConfig
from gemray_workers.scheduling.request import Sequence


class Drafts(NamedTuple):
    """What one sequence is to draft in a step."""

    number: int
    drafter: int = 0
    """Who drafts, by its place in `DrafterPlan.members`."""


def num_drafts_within_limits(wanted: int, sequence: Sequence, config: SchedulerConfig) -> int:
    """Cut the drafts that a drafter wants to give a sequence whose last token alone is pending.

    None while it has computed nothing itself that a drafter could start from. Else no more than the server's number,
    the request's number, and what could be emitted as far as it is known; the device verifies no more than it has room
    for.

    Args:
        wanted: by the drafter, for the next step.
    """
    if sequence.least_computed == sequence.num_found:
        return 0
    stated = sequence.params.num_draft_tokens
    room = sequence.end_len(config.max_model_len) - sequence.least_len - 1
    return max(0, min(wanted, config.num_draft_tokens, room, config.num_draft_tokens if stated is None else stated))
