"""A stand-in for verification: cycles of real cost that keep a given number of drafts, right or wrong.

Random weights accept nothing, and the time of a cycle does not depend on it; what a given acceptance length would
give in tokens a second is measured by accepting that many. Only benchmarks of random weights may do this.

Shape legend: S sequences, K most drafts of a sequence, J = K + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_workers.sampling.verify import Verified, verify


class MadeUpAcceptance:
    """Stands in for `verify`, after doing all of its work. Every rank counts the same rounds."""

    def __init__(self, length: float) -> None:
        """`length` tokens a cycle on average, the target's own included."""
        self._accepted_per_round = length - 1
        self._round: Tensor | None = None
        """Counts on the device: a captured cycle counts at each replay."""

    @torch.inference_mode()
    def restart(self) -> None:
        """Count from the start again. The same object serves run after run: graphs that hold it are captured once."""
        if self._round is not None:
            self._round.zero_()

    def __call__(self, draft_ids_SK: Tensor, num_drafts_S: Tensor, chosen_ids_SJ: Tensor) -> Verified:
        """As `verify`; of each sequence's drafts the first n are kept, with n averaging the length wanted."""
        verify(draft_ids_SK, num_drafts_S, chosen_ids_SJ)
        if self._round is None:
            self._round = torch.zeros((), dtype=torch.float64, device=draft_ids_SK.device)
        if draft_ids_SK.shape[1]:
            self._round += 1
        so_far, before = (torch.floor(r * self._accepted_per_round + 1e-9) for r in (self._round, self._round - 1))
        accepted_S = num_drafts_S.minimum((so_far - before).long())
        position_J = torch.arange(chosen_ids_SJ.shape[1], device=chosen_ids_SJ.device)
        drafts_SJ = torch.cat([draft_ids_SK, chosen_ids_SJ[:, -1:]], dim=1)
        ids_SJ = torch.where(position_J < accepted_S[:, None], drafts_SJ, chosen_ids_SJ)
        return Verified(accepted_S, ids_SJ.masked_fill(position_J > accepted_S[:, None], -1))
