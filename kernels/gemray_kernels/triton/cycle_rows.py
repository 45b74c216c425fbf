"""The rows of a cycle in two Triton kernels where separate operations were about sixty; integer arithmetic alone.

No number of the host specializes a program, so a server compiles each kernel once, whatever its batches are.

Shape legend: A sequences of a cycle and the null slot behind them, S a block of them, T rows, B a block of rows or of
other elements, G KV groups, P block-table columns, R x Q = C a rectangle of rows, D sequences that draft,
K most drafts of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import aligned, require_contiguous, require_rows
from gemray_kernels.sequence_tables import CutField, PageTables, QueryLayout, RowLayout, SequenceTables
from gemray_kernels.triton.early_start import starts_early, wait_for_inputs

BLOCK = 64
"""Rows, or elements of a rectangle, of one program."""
COLUMNS = 1024
"""Block-table columns that are copied at a time."""
START = tl.constexpr(int(CutField.START))
KNOWN = tl.constexpr(int(CutField.KNOWN))
DRAFTS = tl.constexpr(int(CutField.DRAFTS))
CHOOSES = tl.constexpr(int(CutField.CHOOSES))
GRANTED = tl.constexpr(6)
"""Columns of what was granted."""


def cut_rows(granted_S6: Tensor, tables: SequenceTables) -> Tensor:
    """As `gemray_kernels.reference.cycle_rows.cut_rows`."""
    require_contiguous(granted=granted_S6, computed=tables.computed_N, end=tables.end_N)
    num_seqs = len(granted_S6)
    cut_5A = torch.empty(len(CutField), num_seqs, dtype=torch.int64, device=granted_S6.device)
    early = starts_early(granted_S6)
    _cut_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        granted_S6, tables.computed_N, tables.end_N, cut_5A, num_seqs,
        BLOCK=BLOCK, EARLY=early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return cut_5A


def pack_rows(
    cut_5A: Tensor,
    tables: SequenceTables,
    pages: PageTables,
    *,
    num_rows: int,
    rectangle: tuple[int, int],
    block_mask: int | None,
) -> RowLayout:
    """As `gemray_kernels.reference.cycle_rows.pack_rows`."""
    _check(cut_5A, tables, pages)
    device, num_seqs, num_groups = cut_5A.device, cut_5A.shape[1], len(pages.places)
    num_choosing, num_columns = rectangle
    stride, cells = aligned(num_rows, 8), num_choosing * num_columns
    rows_4T = torch.empty(4, stride, dtype=torch.int64, device=device)
    kv_index_GT = torch.empty(num_groups, stride, dtype=torch.int64, device=device)
    first_A = torch.empty(num_seqs, dtype=torch.int64, device=device)
    query_start_Z = torch.empty(num_seqs + 1, dtype=torch.int32, device=device)
    kv_len_A = torch.empty(num_seqs, dtype=torch.int32, device=device)
    rectangle_3C = torch.empty(3, aligned(cells, 8), dtype=torch.int64, device=device)
    copied, block_tables = _empty_block_tables(pages, num_seqs)
    blocks_of_rows = triton.cdiv(max(num_rows, cells), BLOCK)
    early = starts_early(cut_5A)
    _pack_kernel[(max(blocks_of_rows, num_seqs), 2 + num_groups)](
        cut_5A, tables.token_ids_NL, pages.pages, pages.places_G4,
        rows_4T, kv_index_GT, first_A, query_start_Z, kv_len_A, rectangle_3C, copied,
        num_seqs, num_rows, stride, cells, rectangle_3C.stride(0), num_columns, num_groups,
        tables.null_slot, tables.token_ids_NL.stride(0),
        -1 if block_mask is None else block_mask, BLOCKS=block_mask is not None,
        BLOCK=BLOCK, COLUMNS=COLUMNS, BLOCK_S=_block_of_sequences(tables), EARLY=early,
        num_warps=4, launch_pdl=early,
    )  # fmt: skip
    token_ids_T, positions_T, sequence_T, offset_T = rows_4T[:, :num_rows].unbind()
    slot_C, position_C, row_C = rectangle_3C[:, :cells].unbind()
    return RowLayout(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        sequence_T=sequence_T,
        offset_T=offset_T,
        first_A=first_A,
        query_start_Z=query_start_Z,
        kv_len_A=kv_len_A,
        kv_index_GT=kv_index_GT[:, :num_rows],
        block_tables=block_tables,
        slot_RQ=slot_C.view(rectangle),
        position_RQ=position_C.view(rectangle),
        row_RQ=row_C.view(rectangle),
    )


def query_rows(
    cut_5A: Tensor, tables: SequenceTables, pages: PageTables, *, num_drafting: int, num_drafts: int, delta: int
) -> QueryLayout:
    """As `gemray_kernels.reference.cycle_rows.query_rows`."""
    _check(cut_5A, tables, pages)
    device = cut_5A.device
    stride = aligned(num_drafting, 8)
    rows_4D = torch.empty(4, stride, dtype=torch.int64, device=device)
    query_start_Z = torch.empty(num_drafting + 1, dtype=torch.int32, device=device)
    kv_len_D = torch.empty(num_drafting, dtype=torch.int32, device=device)
    position_KD = torch.empty(num_drafts, stride, dtype=torch.int64, device=device)
    copied, block_tables = _empty_block_tables(pages, num_drafting)
    early = starts_early(cut_5A)
    _query_kernel[(num_drafting, 1 + len(pages.places))](
        cut_5A, tables.token_ids_NL, pages.pages, pages.places_G4,
        rows_4D, query_start_Z, kv_len_D, position_KD, copied,
        cut_5A.shape[1], num_drafting, stride, num_drafts, delta, tables.null_slot, tables.token_ids_NL.stride(0),
        COLUMNS=COLUMNS, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    slot_D, token_ids_D, positions_D, nothing_written_D = rows_4D[:, :num_drafting].unbind()
    return QueryLayout(
        slot_D=slot_D,
        token_ids_D=token_ids_D,
        positions_D=positions_D,
        query_start_Z=query_start_Z,
        kv_len_D=kv_len_D,
        nothing_written_D=nothing_written_D,
        block_tables=block_tables,
        draft_position_KD=position_KD[:, :num_drafting],
    )


def _check(cut_5A: Tensor, tables: SequenceTables, pages: PageTables) -> None:
    require_contiguous(cut=cut_5A, pages=pages.pages, places=pages.places_G4)
    require_rows(token_ids=tables.token_ids_NL)


def _block_of_sequences(tables: SequenceTables) -> int:
    """The same in every batch of a server; a cycle has an entry a slot at most, the null slot's among them."""
    return max(16, int(triton.next_power_of_2(len(tables.computed_N))))


def _empty_block_tables(pages: PageTables, num_seqs: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Memory for rows of all groups' block tables, and each group's part of it."""
    rows = aligned(num_seqs, 4)
    sizes = [rows * place.width for place in pages.places]
    copied = torch.empty(sum(sizes), dtype=torch.int32, device=pages.pages.device)
    parts: Sequence[Tensor] = torch.split(copied, sizes)
    return copied, tuple(part.view(rows, -1)[:num_seqs] for part in parts)


@triton.jit(do_not_specialize=["num_seqs"])  # type: ignore[untyped-decorator]
def _cut_kernel(granted_S6, computed_N, end_N, cut_5A, num_seqs, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_for_inputs(EARLY)
    s_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_seq_B = s_B < num_seqs
    slot_B = tl.load(granted_S6 + s_B * GRANTED, mask=is_seq_B, other=0)
    known_B = tl.load(granted_S6 + s_B * GRANTED + 1, mask=is_seq_B, other=0)
    drafts_B = tl.load(granted_S6 + s_B * GRANTED + 2, mask=is_seq_B, other=0)
    is_sampling_B = tl.load(granted_S6 + s_B * GRANTED + 3, mask=is_seq_B, other=0) > 0
    start_B = tl.load(computed_N + slot_B, mask=is_seq_B, other=0)
    room_B = tl.load(end_N + slot_B, mask=is_seq_B, other=0) - start_B - known_B
    chooses_B = is_sampling_B & (room_B > 0)
    ended_B = is_sampling_B & (room_B <= 0)
    tl.store(cut_5A + s_B, slot_B, mask=is_seq_B)
    tl.store(cut_5A + START * num_seqs + s_B, start_B, mask=is_seq_B)
    tl.store(cut_5A + KNOWN * num_seqs + s_B, tl.where(ended_B, 0, known_B), mask=is_seq_B)
    drafts_B = tl.where(chooses_B, tl.maximum(tl.minimum(drafts_B, room_B - 1), 0), 0)
    tl.store(cut_5A + DRAFTS * num_seqs + s_B, drafts_B, mask=is_seq_B)
    tl.store(cut_5A + CHOOSES * num_seqs + s_B, chooses_B.to(tl.int64), mask=is_seq_B)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_block_table(pages, places_G4, copied, group, slot, row, num_rows, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row of one group's block table."""
    first_cell = tl.load(places_G4 + group * 4)
    width = tl.load(places_G4 + group * 4 + 1)
    widths_before = tl.load(places_G4 + group * 4 + 3)
    source = pages + first_cell + slot * width
    target = copied + widths_before * ((num_rows + 3) // 4 * 4) + row * width
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        page = tl.load(source + column, mask=column < width, other=0)
        tl.store(target + column, page, mask=column < width)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "num_seqs",
        "num_rows",
        "rows_stride",
        "num_cells",
        "cells_stride",
        "num_columns",
        "num_groups",
        "null_slot",
        "tokens_stride",
        "block_mask",
    ]
)
def _pack_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    cut_5A,
    token_ids_NL,
    pages,
    places_G4,
    rows_4T,
    kv_index_GT,
    first_A,
    query_start_Z,
    kv_len_A,
    rectangle_3C,
    copied,
    num_seqs,
    num_rows,
    rows_stride,
    num_cells,
    cells_stride,
    num_columns,
    num_groups,
    null_slot,
    tokens_stride,
    block_mask,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    program = tl.program_id(0)
    part = tl.program_id(1)
    if part >= 2:
        if program < num_seqs:
            slot = tl.load(cut_5A + program)
            _copy_block_table(pages, places_G4, copied, part - 2, slot, program.to(tl.int64), num_seqs, COLUMNS)
        return

    s_S = tl.arange(0, BLOCK_S)
    is_seq_S = s_S < num_seqs - 1  # without the null slot
    known_S = tl.load(cut_5A + KNOWN * num_seqs + s_S, mask=is_seq_S, other=0).to(tl.int32)
    drafts_S = tl.load(cut_5A + DRAFTS * num_seqs + s_S, mask=is_seq_S, other=0).to(tl.int32)
    count_S = known_S + drafts_S
    if BLOCKS:
        count_S = tl.where(drafts_S > 0, drafts_S + 1, 0)
    end_S = tl.cumsum(count_S, axis=0)
    at_B = program * BLOCK + tl.arange(0, BLOCK)
    if part == 0:
        is_row_B = at_B < num_rows
        is_before_BS = (end_S[None, :] <= at_B[:, None]) & is_seq_S[None, :]
        sequence_B = tl.sum(is_before_BS.to(tl.int32), axis=1)
        offset_B = at_B - tl.max(tl.where(is_before_BS, end_S[None, :], 0), axis=1)
        start_B = tl.load(cut_5A + START * num_seqs + sequence_B, mask=is_row_B, other=0)
        slot_B = tl.load(cut_5A + sequence_B, mask=is_row_B, other=0)
        position_B = tl.where(sequence_B < num_seqs - 1, start_B + offset_B, 0)
        token_B = tl.load(token_ids_NL + slot_B * tokens_stride + position_B, mask=is_row_B, other=0)
        if BLOCKS:
            token_B = tl.where(offset_B > 0, block_mask, token_B)
        tl.store(rows_4T + at_B, token_B, mask=is_row_B)
        tl.store(rows_4T + rows_stride + at_B, position_B, mask=is_row_B)
        tl.store(rows_4T + 2 * rows_stride + at_B, sequence_B.to(tl.int64), mask=is_row_B)
        tl.store(rows_4T + 3 * rows_stride + at_B, offset_B.to(tl.int64), mask=is_row_B)
        for group in range(num_groups):
            first_cell = tl.load(places_G4 + group * 4)
            width = tl.load(places_G4 + group * 4 + 1)
            page_size = tl.load(places_G4 + group * 4 + 2)
            cell_B = first_cell + slot_B * width + position_B // page_size
            page_B = tl.load(pages + cell_B, mask=is_row_B, other=0).to(tl.int64)
            tl.store(
                kv_index_GT + group * rows_stride + at_B, page_B * page_size + position_B % page_size, mask=is_row_B
            )
    else:
        first_row_S = end_S - count_S
        if program == 0:
            start_S = tl.load(cut_5A + START * num_seqs + s_S, mask=is_seq_S, other=0).to(tl.int32)
            tl.store(first_A + s_S, first_row_S.to(tl.int64), mask=s_S < num_seqs)
            tl.store(query_start_Z + s_S, first_row_S, mask=s_S < num_seqs)
            tl.store(query_start_Z + num_seqs, num_rows)
            kv_len_S = tl.where(count_S > 0, start_S + count_S, 0)
            tl.store(kv_len_A + s_S, kv_len_S, mask=s_S < num_seqs)
        is_cell_B = at_B < num_cells
        sequence_B = at_B // num_columns
        column_B = at_B % num_columns
        first_B = tl.sum(tl.where(s_S[None, :] == sequence_B[:, None], first_row_S[None, :], 0), axis=1)
        slot_B = tl.load(cut_5A + sequence_B, mask=is_cell_B, other=0)
        start_B = tl.load(cut_5A + START * num_seqs + sequence_B, mask=is_cell_B, other=0)
        drafts_B = tl.load(cut_5A + DRAFTS * num_seqs + sequence_B, mask=is_cell_B, other=0).to(tl.int32)
        if BLOCKS:
            belongs_B = drafts_B > 0
            row_B = first_B + column_B + 1
            position_B = tl.where(belongs_B, start_B, 0) + column_B + 1
        else:
            belongs_B = tl.load(cut_5A + CHOOSES * num_seqs + sequence_B, mask=is_cell_B, other=0) > 0
            known_B = tl.load(cut_5A + KNOWN * num_seqs + sequence_B, mask=is_cell_B, other=0).to(tl.int32)
            offset_B = tl.minimum(column_B, drafts_B)
            row_B = first_B + tl.maximum(known_B - 1, 0) + offset_B
            position_B = start_B + known_B + offset_B
        tl.store(rectangle_3C + at_B, tl.where(belongs_B, slot_B, null_slot), mask=is_cell_B)
        tl.store(rectangle_3C + cells_stride + at_B, position_B, mask=is_cell_B)
        tl.store(rectangle_3C + 2 * cells_stride + at_B, tl.minimum(row_B, num_rows - 1).to(tl.int64), mask=is_cell_B)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_seqs", "num_drafting", "stride", "num_drafts", "delta", "null_slot", "tokens_stride"]
)
def _query_kernel(  # type: ignore[no-untyped-def]
    cut_5A,
    token_ids_NL,
    pages,
    places_G4,
    rows_4D,
    query_start_Z,
    kv_len_D,
    position_KD,
    copied,
    num_seqs,
    num_drafting,
    stride,
    num_drafts,
    delta,
    null_slot,
    tokens_stride,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    d = tl.program_id(0)
    part = tl.program_id(1)
    drafts = tl.load(cut_5A + DRAFTS * num_seqs + d)
    slot = tl.load(cut_5A + d)
    start = tl.load(cut_5A + START * num_seqs + d)
    slot = tl.where(drafts > 0, slot, null_slot)
    start = tl.where(drafts > 0, start, 0)
    if part > 0:
        _copy_block_table(pages, places_G4, copied, part - 1, slot, d.to(tl.int64), num_drafting, COLUMNS)
        return
    tl.store(rows_4D + d, slot)
    tl.store(rows_4D + stride + d, tl.load(token_ids_NL + slot * tokens_stride + start))
    tl.store(rows_4D + 2 * stride + d, tl.maximum(start + delta, 0))
    tl.store(rows_4D + 3 * stride + d, start * 0)
    tl.store(query_start_Z + d, d)
    tl.store(query_start_Z + num_drafting, num_drafting)
    tl.store(kv_len_D + d, start.to(tl.int32))
    for k in range(num_drafts):
        tl.store(position_KD + k * stride + d, start + 1 + k)
