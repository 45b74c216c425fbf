"""A warning for drafters that hardly ever guess right: nearly always a fault of set-up, not of the drafter."""

from __future__ import annotations

MIN_DRAFTS = 1000
MIN_ACCEPTANCE = 0.05
_CAUSES = (
    "the drafter was made for another target or another fine-tune of it",
    "the target is quantised and the drafter was trained on the original",
    "the drafter's layers read another KV group's block table",
    "captured layers are shifted by one (DFlash), or the hidden state is of another row (MTP)",
)


class AcceptanceAlarm:
    """Watches windows of `MIN_DRAFTS` drafts that had a chance: those behind a wrong one say nothing."""

    def __init__(self) -> None:
        self._judged = 0
        self._accepted = 0
        self._has_warned = False

    def observe(self, *, drafted: int, accepted: int) -> str | None:
        """Count one sequence's round.

        Returns a sentence when a window's acceptance is below `MIN_ACCEPTANCE` and the window before it was not,
        else None.
        """
        self._judged += min(accepted + 1, drafted)
        self._accepted += accepted
        if self._judged < MIN_DRAFTS:
            return None
        rate, text = self._accepted / self._judged, self._sentence()
        self._judged = self._accepted = 0
        has_warned, self._has_warned = self._has_warned, rate < MIN_ACCEPTANCE
        return text if self._has_warned and not has_warned else None

    def _sentence(self) -> str:
        return (
            f"{self._accepted} of {self._judged} drafts were accepted ({self._accepted / self._judged:.1%}): "
            "output is right but speculation only costs time. Likely causes: " + "; ".join(_CAUSES)
        )
