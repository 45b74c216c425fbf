"""The rows of a cycle whose output is used: the last ones of each sequence, its drafts among them.

Behind the last layer that writes keys, a model computes no others (`gemray_workers.model.target`).

Shape legend: A sequences of a cycle and the null slot behind them, T rows, U rows whose output is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.sequence_tables import CutField


def cut_to_outputs(cut_5A: Tensor, granted_S6: Tensor) -> Tensor:
    """What is left when of each sequence's known rows only those stay whose output is used: int64 [5, A].

    Args:
        cut_5A: by `CutField`.
        granted_S6: int64, as of `cut_rows`; the last column says how many known rows at the end have outputs.
    """
    slot_A, start_A, known_A, drafts_A, chooses_A = cut_5A.unbind()
    outputs_A = granted_S6[:, 5].minimum(known_A)
    return torch.stack([slot_A, start_A + known_A - outputs_A, outputs_A, drafts_A, chooses_A])


def output_places(
    cut_5A: Tensor, output_cut_5A: Tensor, first_A: Tensor, sequence_U: Tensor, offset_U: Tensor, num_rows: int
) -> Tensor:
    """Index int64 [U] into a cycle's rows of those whose output is used.

    Args:
        cut_5A: by `CutField`.
        output_cut_5A: what `cut_to_outputs` made of it.
        first_A: int64, index into T of each sequence's first row.
        sequence_U: int64, index into A of each row with an output.
        offset_U: int64, of such a row among its sequence's rows with outputs.
        num_rows: T. Rows of padding may have any index below it.
    """
    skipped_A = cut_5A[CutField.KNOWN] - output_cut_5A[CutField.KNOWN]
    return ((first_A + skipped_A)[sequence_U] + offset_U).clamp(max=num_rows - 1)
