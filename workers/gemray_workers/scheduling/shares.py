"""How many rows of a step each sequence gets: drafts within every limit of them, then all rows dealt max-min fair."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from gemray_workers.scheduling.config import SchedulerConfig
from gemray_workers.scheduling.plan import ScheduledRows
from gemray_workers.scheduling.request import Sequence


class Drafts(NamedTuple):
    """What one sequence is to draft in a step."""

    number: int
    drafter: int = 0
    """Who drafts, by its place in `DrafterPlan.members`."""


@dataclass
class Share:
    """How many rows a sequence gets; shrinks while pages are looked for."""

    sequence: Sequence
    num_known: int
    num_drafts: int = 0
    drafter: int = 0

    def rows(self) -> ScheduledRows:
        """As the plan says it."""
        sequence = self.sequence
        return ScheduledRows(
            slot=sequence.running_slot,
            start=sequence.least_computed,
            num_known=self.num_known,
            num_drafts=self.num_drafts,
            samples=self.num_known == sequence.num_pending,
            prompt_logprobs_from=sequence.prompt_logprobs_from(self.num_known),
            epoch=sequence.epoch,
            drafter=self.drafter,
        )


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


def deal(decoding: SequenceOf[Share], prefilling: SequenceOf[Sequence], config: SchedulerConfig) -> list[Share]:
    """Deal a step's rows: a row for each sequence that decodes, then prompts and drafts out of the rest.

    Prompts have half of the rest for themselves, so drafts hold up no prompt: one that is alone gets a chunk or half of
    the rest in each step, whichever is less, and several share max-min fair. What prompts leave goes to drafts, and
    what drafts leave to prompts. Drafts are cut evenly: their number changes speed alone.

    Args:
        decoding: with the drafts that are wanted; cut to what they get.
        prefilling: sequences with several tokens pending; no more than there are rows in the rest.
        config: of the scheduler.
    """
    rest = config.max_step_tokens - len(decoding)
    wanted = [config.chunk(sequence.num_pending) for sequence in prefilling]
    for_prompts = max(min(sum(wanted), rest // 2), len(wanted))
    for share, num_drafts in zip(
        decoding, fair_shares(rest - for_prompts, [share.num_drafts for share in decoding]), strict=True
    ):
        share.num_drafts = num_drafts
    rows = fair_shares(rest - sum(share.num_drafts for share in decoding), wanted)
    return [*decoding, *(Share(sequence, num_known) for sequence, num_known in zip(prefilling, rows, strict=True))]


def fair_shares(budget: int, demands: SequenceOf[int]) -> list[int]:
    """Water-filling in whole rows: small demands are met, the rest is split evenly among the large.

    Rows that do not divide evenly go to the first in the list. The shares add up to min(budget, sum of demands), and
    with budget >= len(demands) nobody who asks is left without a row.
    """
    shares = [0] * len(demands)
    smallest_first = sorted(range(len(demands)), key=lambda index: (demands[index], -index))
    for num_served, index in enumerate(smallest_first):
        share = min(demands[index], budget // (len(demands) - num_served))
        shares[index] = share
        budget -= share
    return shares
