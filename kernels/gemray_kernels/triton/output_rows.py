"""`reference.output_rows` in Triton, one kernel each; no number specializes a program.

Shape legend: A sequences of a cycle and the null slot behind them, T rows, U rows whose output is used, B a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_contiguous
from gemray_kernels.triton.cycle_rows import BLOCK, CHOOSES, DRAFTS, GRANTED, KNOWN, START
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs


def cut_to_outputs(cut_5A: Tensor, granted_S6: Tensor) -> Tensor:
    """As `gemray_kernels.reference.output_rows.cut_to_outputs`."""
    require_contiguous(cut=cut_5A, granted=granted_S6)
    output_cut_5A, early = torch.empty_like(cut_5A), starts_early(cut_5A)
    num_seqs = cut_5A.shape[1]
    _cut_to_outputs_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        cut_5A, granted_S6, output_cut_5A, num_seqs, BLOCK=BLOCK, EARLY=early, num_warps=1, launch_pdl=early
    )
    return output_cut_5A


def output_places(
    cut_5A: Tensor, output_cut_5A: Tensor, first_A: Tensor, sequence_U: Tensor, offset_U: Tensor, num_rows: int
) -> Tensor:
    """As `gemray_kernels.reference.output_rows.output_places`."""
    require_contiguous(cut=cut_5A, output_cut=output_cut_5A, first=first_A, sequence=sequence_U, offset=offset_U)
    place_U, early = torch.empty_like(sequence_U), starts_early(cut_5A)
    if place_U.numel():
        _output_places_kernel[(triton.cdiv(len(place_U), BLOCK),)](
            cut_5A, output_cut_5A, first_A, sequence_U, offset_U, place_U, cut_5A.shape[1], len(place_U), num_rows,
            BLOCK=BLOCK, EARLY=early, num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return place_U


@triton.jit(do_not_specialize=["num_seqs"])  # type: ignore[untyped-decorator]
def _cut_to_outputs_kernel(  # type: ignore[no-untyped-def]
    cut_5A, granted_S6, output_cut_5A, num_seqs, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_inputs(EARLY)
    s_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_seq_B = s_B < num_seqs
    known_B = tl.load(cut_5A + KNOWN * num_seqs + s_B, mask=is_seq_B, other=0)
    outputs_B = tl.minimum(tl.load(granted_S6 + s_B * GRANTED + 5, mask=is_seq_B, other=0), known_B)
    start_B = tl.load(cut_5A + START * num_seqs + s_B, mask=is_seq_B, other=0) + known_B - outputs_B
    tl.store(output_cut_5A + s_B, tl.load(cut_5A + s_B, mask=is_seq_B, other=0), mask=is_seq_B)
    tl.store(output_cut_5A + START * num_seqs + s_B, start_B, mask=is_seq_B)
    tl.store(output_cut_5A + KNOWN * num_seqs + s_B, outputs_B, mask=is_seq_B)
    for field in tl.static_range(DRAFTS, CHOOSES + 1):
        at_B = field * num_seqs + s_B
        tl.store(output_cut_5A + at_B, tl.load(cut_5A + at_B, mask=is_seq_B, other=0), mask=is_seq_B)


@triton.jit(do_not_specialize=["num_seqs", "num_outputs", "num_rows"])  # type: ignore[untyped-decorator]
def _output_places_kernel(  # type: ignore[no-untyped-def]
    cut_5A,
    output_cut_5A,
    first_A,
    sequence_U,
    offset_U,
    place_U,
    num_seqs,
    num_outputs,
    num_rows,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    u_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside_B = u_B < num_outputs
    sequence_B = tl.load(sequence_U + u_B, mask=inside_B, other=0)
    place_B = tl.load(first_A + sequence_B, mask=inside_B, other=0)
    place_B += tl.load(cut_5A + KNOWN * num_seqs + sequence_B, mask=inside_B, other=0)
    place_B -= tl.load(output_cut_5A + KNOWN * num_seqs + sequence_B, mask=inside_B, other=0)
    place_B += tl.load(offset_U + u_B, mask=inside_B, other=0)
    tl.store(place_U + u_B, tl.minimum(place_B, num_rows - 1), mask=inside_B)
