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
    """Watches windows of `MIN_DRAFTS` drafts."""

    def __init__(self) -> None:
        self._drafted = 0
        self._accepted = 0

    def observe(self, drafted: int, accepted: int) -> str | None:
        """Count drafts; a sentence when a whole window's acceptance is below `MIN_ACCEPTANCE`, else None."""
        self._drafted += drafted
        self._accepted += accepted
        if self._drafted < MIN_DRAFTS:
            return None
        rate = self._accepted / self._drafted
        text = (
            f"{self._accepted} of the last {self._drafted} drafts were accepted ({rate:.1%}): "
            "output is right but speculation only costs time. Likely causes: " + "; ".join(_CAUSES)
        )
        self._drafted = self._accepted = 0
        return text if rate < MIN_ACCEPTANCE else None
