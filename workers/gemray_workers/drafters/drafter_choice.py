"""Which of several drafters drafts in the next step, and how many tokens: a pure function of what was measured of each.

Each drafter has `Estimates` of its own: acceptance by position, and the seconds of steps by load and length; steps
without drafts belong to all of them. A drafter's best length under a load is worth a factor over plain decoding, and
the drafter with the largest factor drafts; where it is 1, nobody does. Factors can be compared even if one drafter's
times had to be borrowed from another load.

What is not known is tried first: each drafter's lengths, one drafter after the other. Texts change, and acceptance is
learnt from one's own drafts alone, so from time to time a drafter that is not used gets some steps in a row, and its
estimates the chance to change.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemray_workers.drafters.draft_length import (
    RETRY_EVERY,
    Estimates,
    Load,
    best_length,
    is_worth_trying,
    length_to_measure,
    other_length,
)
from gemray_workers.scheduling.shares import Drafts

PROBE_STEPS = 8
"""Steps in a row that an unused drafter gets, once in two times `RETRY_EVERY`."""


def choose_drafts(estimates: Sequence[Estimates], load: Load, num_draft_tokens: Sequence[int]) -> Drafts:
    """Who drafts in the next step, and how many tokens a sequence, as few as none.

    Args:
        estimates: by drafter.
        load: of the next step, as far as it is known before.
        num_draft_tokens: each drafter's limit.
    """
    for drafter, (own, most) in enumerate(zip(estimates, num_draft_tokens, strict=True)):
        length = length_to_measure(own, load, most)
        if length is not None:
            return Drafts(length, drafter)
    found = [best_length(own, load, most) for own, most in zip(estimates, num_draft_tokens, strict=True)]
    best = max(range(len(found)), key=lambda drafter: found[drafter][1])
    turn, step = _turn(estimates, load)
    if turn % 2 == 0 and step >= RETRY_EVERY - PROBE_STEPS:
        other = _other_drafter(best, len(found), turn // 2)
        return Drafts(num_draft_tokens[other], other)
    if turn % 2 == 1 and step == RETRY_EVERY - 1:
        return Drafts(other_length(found[best][0], num_draft_tokens[best], turn // 2), best)
    return Drafts(found[best][0], best)


def choose_drafter(estimates: Sequence[Estimates], load: Load, num_draft_tokens: Sequence[int]) -> Drafts:
    """Who drafts in the next step where numbers of drafts are fixed. Arguments as of `choose_drafts`."""
    options = [Drafts(most, drafter) for drafter, most in enumerate(num_draft_tokens)]
    for option in options:
        if is_worth_trying(estimates[option.drafter], load, option.number):
            return option
    times = [own.times.get((load, option.number)) for own, option in zip(estimates, options, strict=True)]
    seconds = [time.seconds for time in times if time is not None and time.is_known]
    if len(seconds) < len(options):
        seconds = [1.0] * len(options)  # steps of these lengths do not occur: acceptance decides
    best = max(options, key=lambda o: estimates[o.drafter].expected_tokens(o.number) / seconds[o.drafter])
    turn, step = _turn(estimates, load)
    if step >= RETRY_EVERY - PROBE_STEPS:
        return options[_other_drafter(best.drafter, len(options), turn)]
    return best


def _turn(estimates: Sequence[Estimates], load: Load) -> tuple[int, int]:
    """How often the time for a retry has come under `load`, and the decisions since."""
    return divmod(sum(own.decisions.get(load, 0) for own in estimates), RETRY_EVERY)


def _other_drafter(best: int, num_drafters: int, turn: int) -> int:
    others = [drafter for drafter in range(num_drafters) if drafter != best]
    return others[turn % len(others)]
