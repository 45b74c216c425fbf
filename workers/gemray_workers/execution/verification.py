"""What the choice of tokens is told of a cycle's drafts, where penalties count them.

Shape legend: C sequences that may choose tokens, K most drafts of one, J = K + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.sequence_tables import RowLayout
from gemray_workers.execution.slots import SlotTable


def input_ids(layout: RowLayout, slots: SlotTable) -> Tensor:
    """[C, J]: the known token that each sequence's first row that chooses computes, then its drafts.

    Args:
        layout: of the cycle's rows, its rectangle [C, J] those that choose.
        slots: the tokens, nothing emitted yet.
    """
    before_C1 = (layout.position_RQ[:, :1] - 1).clamp(min=0)
    return slots.token_ids_NL[layout.slot_RQ, torch.cat([before_C1, layout.position_RQ[:, :-1]], dim=1)]
