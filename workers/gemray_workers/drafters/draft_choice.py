"""Drafts are chosen as the target chooses tokens: the same noise, edits and filters on the drafter's logits.

With the shared noise a draft equals the target's token wherever the two distributions are close, which at T > 0
happens more often than for a greedy draft (arXiv 2408.07978). A draft never changes what is emitted.

Shape legend: R rows, V local vocabulary rows.
"""

from __future__ import annotations

from torch import Tensor

from gemray_workers.parallel.communicator import Communicator
from gemray_workers.sampling.choose import choose
from gemray_workers.sampling.features import Features
from gemray_workers.sampling.state import SamplingState


class DraftChooser:
    """Chooses drafts at given positions behind the newest token of sequences."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def choose(
        self,
        logits_RV: Tensor,
        slot_R: Tensor,
        position_R: Tensor,
        sampling: SamplingState,
        features: Features,
        softcap: float | None = None,
    ) -> Tensor:
        """One draft a row, int64 [R]; -1 where the logits are unusable.

        Args:
            logits_RV: the drafter's local logits in the compute dtype.
            slot_R: for each row, the sequence's slot.
            position_R: for each row, the position at which the draft would stand.
            sampling: of the slots.
            features: what the cycle's sequences need.
            softcap: what the logits still lack.
        """
        features = features.of_drafts()
        choice = choose(logits_RV, slot_R, position_R, sampling, self._comm, features=features, softcap=softcap)
        return choice.ids_R
