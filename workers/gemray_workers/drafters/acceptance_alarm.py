"""A warning for drafters that hardly ever guess right: nearly always a fault of set-up, not of the drafter.

The statistics count every draft. The alarm counts only those that had a chance: a draft behind a wrong one says
nothing, so a block of 15 whose first draft is wrong counts as one. That share of accepted drafts is never below the one
of the statistics: a drafter that the alarm reports is wrong by either count, and a good one whose later positions are
seldom reached is not reported.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_DRAFTS = 1000
MIN_ACCEPTANCE = 0.05
MIN_ROUNDS_GIVEN_UP = 16
"""Rounds needed to judge a drafter that was given up: one that is right three times in ten has a hit among them in 299
of 300 cases."""
_CAUSES = (
    "the drafter was made for another target or another fine-tune of it",
    "the target is quantised and the drafter was trained on the original",
    "the drafter's layers read another KV group's block table",
    "captured layers are shifted by one (DFlash), or the hidden state is of another row (MTP)",
)


@dataclass
class _Count:
    """Drafts of some rounds, and how many of them were accepted."""

    rounds: int = 0
    drafted: int = 0
    judged: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += drafted
        self.judged += min(accepted + 1, drafted)
        self.accepted += accepted

    @property
    def is_bad(self) -> bool:
        return self.accepted < MIN_ACCEPTANCE * self.judged

    def sentence(self, effect: str) -> str:
        return (
            f"{self.accepted} of {self.drafted} drafts were accepted ({self.accepted / self.drafted:.1%}) in "
            f"{self.rounds} rounds: {effect}. Likely causes: " + "; ".join(_CAUSES)
        )


class AcceptanceAlarm:
    """Watches windows of `MIN_DRAFTS` drafts, or fewer when the drafter is given up before that many."""

    def __init__(self) -> None:
        self._window = _Count()
        self._total = _Count()
        self._has_warned = False

    def observe(self, *, drafted: int, accepted: int) -> str | None:
        """Count one sequence's round.

        Returns a sentence when a window's acceptance is below `MIN_ACCEPTANCE` and no warning was given since the
        last window in which it was not, else None.
        """
        self._window.add(drafted, accepted)
        self._total.add(drafted, accepted)
        if self._window.drafted < MIN_DRAFTS:
            return None
        window, self._window = self._window, _Count()
        has_warned, self._has_warned = self._has_warned, window.is_bad
        if has_warned or not window.is_bad:
            return None
        return window.sentence("output is right but speculation only costs time")

    def given_up(self) -> str | None:
        """Record that the drafter is no longer used, apart from an occasional try; may be called in every step.

        Returns a sentence, once, if acceptance since the start is below `MIN_ACCEPTANCE` in enough rounds. A drafter
        that was good before is not at fault when a text is hard to guess.
        """
        if self._has_warned or self._total.rounds < MIN_ROUNDS_GIVEN_UP or not self._total.is_bad:
            return None
        self._has_warned = True
        return self._total.sentence("output is right, and drafting was stopped as it only costs time")
