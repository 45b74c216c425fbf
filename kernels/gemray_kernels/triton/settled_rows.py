"""What becomes of a cycle's rows once their tokens are chosen, each step in one Triton kernel.

Shape legend: A sequences of a cycle and the null slot behind them, R of them may choose tokens, Q most drafts of one
and one more, T rows, B a block of rows or sequences, G KV groups, N slots, H width of a state, C drafts of one step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import aligned, require_contiguous, require_rows
from gemray_kernels.sequence_tables import NOTHING, SequenceTables, Settled
from gemray_kernels.triton.cycle_rows import CHOOSES, DRAFTS, KNOWN, START
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs

BLOCK = 128
MOST_COLUMNS = 32
"""Columns of a rectangle that one program holds at least, so that few numbers of drafts need a program of their own."""
BLOCK_H = 1024
NOTHING_CHOSEN = tl.constexpr(NOTHING)


def settle(
    cut_5A: Tensor, chosen_RQ: Tensor, tables: SequenceTables, verified: tuple[Tensor, Tensor] | None = None
) -> Settled:
    """As `gemray_kernels.reference.settled_rows.settle`, but writes nothing for sequences that choose nothing."""
    require_contiguous(cut=cut_5A, chosen=chosen_RQ)
    require_rows(token_ids=tables.token_ids_NL)
    num_choosing, num_columns = chosen_RQ.shape
    num_seqs = cut_5A.shape[1]
    accepted_A = torch.empty(num_seqs, dtype=torch.int64, device=cut_5A.device)
    ids_RQ = torch.empty_like(chosen_RQ)
    found = torch.empty(num_choosing, 2 + num_columns, dtype=torch.int64, device=cut_5A.device)
    if verified is not None:
        require_contiguous(accepted=verified[0], ids=verified[1])
    early = starts_early(cut_5A)
    _settle_kernel[(num_seqs,)](
        cut_5A,
        chosen_RQ if verified is None else verified[1],
        cut_5A if verified is None else verified[0],
        tables.token_ids_NL,
        accepted_A,
        ids_RQ,
        found,
        num_seqs,
        num_choosing,
        num_columns,
        tables.token_ids_NL.stride(0),
        IS_VERIFIED=verified is not None,
        BLOCK_Q=max(MOST_COLUMNS, triton.next_power_of_2(num_columns)),
        EARLY=early,
        num_warps=1,
        launch_pdl=early,
    )
    return Settled(accepted_A, ids_RQ, found)


def advance(cut_5A: Tensor, accepted_A: Tensor, tables: SequenceTables) -> None:
    """As `gemray_kernels.reference.settled_rows.advance`."""
    require_contiguous(cut=cut_5A, accepted=accepted_A, computed=tables.computed_N)
    num_seqs, early = len(accepted_A), starts_early(cut_5A)
    _advance_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        cut_5A, accepted_A, tables.computed_N, num_seqs, BLOCK=BLOCK, EARLY=early, num_warps=1, launch_pdl=early
    )


def write_drafts(ids: Tensor, slot: Tensor, position: Tensor, tables: SequenceTables) -> Tensor:
    """As `gemray_kernels.reference.settled_rows.write_drafts`."""
    require_contiguous(ids=ids, slot=slot, position=position)
    require_rows(token_ids=tables.token_ids_NL)
    written, early = torch.empty_like(ids), starts_early(ids)
    if ids.numel():
        _write_drafts_kernel[(triton.cdiv(ids.numel(), BLOCK),)](
            ids, slot, position, written, tables.token_ids_NL, ids.numel(), tables.token_ids_NL.stride(0),
            BLOCK=BLOCK, EARLY=early, num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return written


def keep_last_rows(rows_TH: Tensor, cut_5A: Tensor, first_A: Tensor, accepted_A: Tensor, kept_NH: Tensor) -> None:
    """As `gemray_kernels.reference.settled_rows.keep_last_rows`, but leaves the null slot's entry alone."""
    require_rows(rows=rows_TH, kept=kept_NH)
    require_contiguous(cut=cut_5A, first=first_A, accepted=accepted_A)
    if rows_TH.dtype != kept_NH.dtype:
        raise ValueError(f"rows are {rows_TH.dtype}, what keeps them is {kept_NH.dtype}; the same dtype is allowed")
    num_seqs, width, early = len(accepted_A), rows_TH.shape[1], starts_early(rows_TH)
    _keep_kernel[(num_seqs, triton.cdiv(width, BLOCK_H))](
        rows_TH, cut_5A, first_A, accepted_A, kept_NH, num_seqs, width, rows_TH.stride(0), kept_NH.stride(0),
        BLOCK_H=BLOCK_H, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip


def committed_places(
    kv_index_GT: Tensor, sequence_T: Tensor, offset_T: Tensor, cut_5A: Tensor, accepted_A: Tensor
) -> Tensor:
    """As `gemray_kernels.reference.settled_rows.committed_places`."""
    require_rows(kv_index=kv_index_GT)
    require_contiguous(sequence=sequence_T, offset=offset_T, cut=cut_5A, accepted=accepted_A)
    num_groups, num_rows = kv_index_GT.shape
    shape = num_groups, aligned(num_rows, kv_index_GT.itemsize)
    places_GT = torch.empty(shape, dtype=kv_index_GT.dtype, device=cut_5A.device)[:, :num_rows]
    early = starts_early(cut_5A)
    if places_GT.numel():
        _places_kernel[(triton.cdiv(num_rows, BLOCK), num_groups)](
            kv_index_GT, sequence_T, offset_T, cut_5A, accepted_A, places_GT,
            num_rows, cut_5A.shape[1], kv_index_GT.stride(0), places_GT.stride(0),
            BLOCK=BLOCK, EARLY=early, num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return places_GT


@triton.jit(do_not_specialize=["num_seqs", "num_choosing", "num_columns", "tokens_stride"])  # type: ignore[untyped-decorator]
def _settle_kernel(  # type: ignore[no-untyped-def]
    cut_5A,
    chosen_RQ,
    accepted_R,
    token_ids_NL,
    accepted_A,
    ids_RQ,
    found,
    num_seqs,
    num_choosing,
    num_columns,
    tokens_stride,
    IS_VERIFIED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    s = tl.program_id(0)
    if s >= num_choosing:
        tl.store(accepted_A + s, 0)
        return
    slot = tl.load(cut_5A + s)
    known = tl.load(cut_5A + KNOWN * num_seqs + s)
    drafts = tl.load(cut_5A + DRAFTS * num_seqs + s)
    chooses = tl.load(cut_5A + CHOOSES * num_seqs + s) > 0
    position = tl.load(cut_5A + START * num_seqs + s) + known
    column_Q = tl.arange(0, BLOCK_Q)
    inside_Q = column_Q < num_columns
    token_Q = token_ids_NL + slot * tokens_stride + position + column_Q
    ids_Q = tl.load(chosen_RQ + s * num_columns + column_Q, mask=inside_Q, other=-1)
    if IS_VERIFIED:
        accepted = tl.load(accepted_R + s)
    else:
        draft_Q = tl.load(token_Q, mask=inside_Q & (column_Q < drafts), other=-1)
        # The first column whose draft is wrong, or that has none.
        is_right_Q = (column_Q < drafts) & (draft_Q == ids_Q)
        accepted = tl.min(tl.where(is_right_Q, BLOCK_Q, column_Q), axis=0).to(tl.int64)
        ids_Q = tl.where(column_Q <= accepted, ids_Q, -1)
    last = tl.where(chooses, drafts, -1)
    tl.store(token_Q, ids_Q, mask=inside_Q & (column_Q <= last) & (ids_Q >= 0))
    tl.store(ids_RQ + s * num_columns + column_Q, ids_Q, mask=inside_Q)
    accepted_here = tl.where(chooses, accepted, 0)
    tl.store(accepted_A + s, accepted_here)
    out = found + s * (num_columns + 2)
    tl.store(out, tl.where(chooses, drafts, 0))
    tl.store(out + 1, accepted_here)
    tl.store(out + 2 + column_Q, tl.where(chooses, ids_Q, NOTHING_CHOSEN), mask=inside_Q)


@triton.jit(do_not_specialize=["num_seqs"])  # type: ignore[untyped-decorator]
def _advance_kernel(cut_5A, accepted_A, computed_N, num_seqs, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_for_inputs(EARLY)
    s_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_seq_B = s_B < num_seqs
    more_B = tl.load(cut_5A + KNOWN * num_seqs + s_B, mask=is_seq_B, other=0)
    more_B += tl.load(accepted_A + s_B, mask=is_seq_B, other=0)
    # Entries that share a slot are padding, which adds nothing.
    moves_B = is_seq_B & (more_B > 0)
    slot_B = tl.load(cut_5A + s_B, mask=moves_B, other=0)
    computed_B = tl.load(computed_N + slot_B, mask=moves_B, other=0)
    tl.store(computed_N + slot_B, computed_B + more_B, mask=moves_B)


@triton.jit(do_not_specialize=["num_ids", "tokens_stride"])  # type: ignore[untyped-decorator]
def _write_drafts_kernel(  # type: ignore[no-untyped-def]
    ids_C, slot_C, position_C, written_C, token_ids_NL, num_ids, tokens_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_inputs(EARLY)
    at_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside_B = at_B < num_ids
    id_B = tl.maximum(tl.load(ids_C + at_B, mask=inside_B, other=0), 0)
    slot_B = tl.load(slot_C + at_B, mask=inside_B, other=0)
    position_B = tl.load(position_C + at_B, mask=inside_B, other=0)
    tl.store(token_ids_NL + slot_B * tokens_stride + position_B, id_B, mask=inside_B)
    tl.store(written_C + at_B, id_B, mask=inside_B)


@triton.jit(do_not_specialize=["num_seqs"])  # type: ignore[untyped-decorator]
def _keep_kernel(  # type: ignore[no-untyped-def]
    rows_TH,
    cut_5A,
    first_A,
    accepted_A,
    kept_NH,
    num_seqs,
    width,
    row_stride,
    kept_stride,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    s = tl.program_id(0)
    committed = tl.load(cut_5A + KNOWN * num_seqs + s) + tl.load(accepted_A + s)
    if committed > 0:
        row = tl.load(first_A + s) + committed - 1
        slot = tl.load(cut_5A + s)
        h_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        kept_H = tl.load(rows_TH + row * row_stride + h_H, mask=h_H < width)
        tl.store(kept_NH + slot * kept_stride + h_H, kept_H, mask=h_H < width)


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "index_stride", "places_stride"])  # type: ignore[untyped-decorator]
def _places_kernel(  # type: ignore[no-untyped-def]
    kv_index_GT,
    sequence_T,
    offset_T,
    cut_5A,
    accepted_A,
    places_GT,
    num_rows,
    num_seqs,
    index_stride,
    places_stride,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside_B = row_B < num_rows
    group = tl.program_id(1)
    sequence_B = tl.load(sequence_T + row_B, mask=inside_B, other=0)
    committed_B = tl.load(cut_5A + KNOWN * num_seqs + sequence_B, mask=inside_B, other=0)
    committed_B += tl.load(accepted_A + sequence_B, mask=inside_B, other=0)
    is_committed_B = tl.load(offset_T + row_B, mask=inside_B, other=0) < committed_B
    place_B = tl.load(kv_index_GT + group * index_stride + row_B, mask=inside_B, other=0)
    tl.store(places_GT + group * places_stride + row_B, tl.where(is_committed_B, place_B, 0), mask=inside_B)
