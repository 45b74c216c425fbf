"""The rows of a cycle, from what the host has granted and what the device knows: integer arithmetic alone.

Every shape follows from the arguments' shapes and the host's numbers, so all of it can be captured in a CUDA graph.

Shape legend: N slots, A sequences of a cycle and the null slot behind them, T rows, G KV groups, P block-table
columns, R x Q a rectangle of rows, D sequences that draft, K most drafts of one, H width of a state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.sequence_tables import CutField, PageTables, QueryLayout, RowLayout, SequenceTables


def cut_rows(granted_S6: Tensor, tables: SequenceTables) -> Tensor:
    """What each sequence has room for of what it was granted: int64 [5, A], by `CutField`.

    Args:
        granted_S6: int64: slot, known rows, drafts, whether it chooses a token; then who drafts and how many known rows
            have outputs, which are not looked at. The null slot's entry is last.
        tables: where the sequences stand.
    """
    slot_A, known_A, drafts_A, samples_A = granted_S6[:, :4].unbind(1)
    start_A = tables.computed_N[slot_A]
    room_A = tables.end_N[slot_A] - start_A - known_A
    is_sampling_A = samples_A > 0
    chooses_A = is_sampling_A & (room_A > 0)
    known_A = known_A * (chooses_A | ~is_sampling_A)
    drafts_A = drafts_A.minimum(room_A - 1).clamp(min=0) * chooses_A
    return torch.stack([slot_A, start_A, known_A, drafts_A, chooses_A.long()])


def pack_rows(
    cut_5A: Tensor,
    tables: SequenceTables,
    pages: PageTables,
    *,
    num_rows: int,
    rectangle: tuple[int, int],
    block_mask: int | None,
) -> RowLayout:
    """Rows one sequence behind the other, from its first uncomputed token on; what is left is the null slot's.

    Rows of the null slot stand at position 0, see no key, and write to the null page. Without `block_mask` a sequence
    has its known rows and its drafts, and the rectangle [R, Q] holds the rows that choose a token: the last known one
    of each of the first R sequences, then its Q - 1 drafts, the last one again where it has fewer. With `block_mask` a
    sequence that drafts has its newest token and a mask for each of its drafts, others nothing, and the rectangle holds
    the draft rows; it reads rows of others behind a sequence's own.

    Args:
        cut_5A: by `CutField`.
        tables: the tokens, drafts among them.
        pages: block tables of the groups in which the rows are addressed.
        num_rows: T; no fewer than there are.
        rectangle: R and Q.
        block_mask: id of a mask.
    """
    slot_A, start_A, known_A, drafts_A, _ = cut_5A.unbind()
    has_blocks = block_mask is not None
    count_A = (drafts_A + 1) * (drafts_A > 0) if has_blocks else known_A + drafts_A
    num_slots, num_seqs = len(tables.computed_N), len(slot_A)
    end_A = count_A.cumsum(0)
    end_A[-1:].fill_(num_rows)
    first_A = torch.cat([end_A.new_zeros(1), end_A[:-1]])
    row_T = torch.arange(num_rows, device=end_A.device)
    sequence_T = torch.searchsorted(end_A, row_T, right=True)
    offset_T = row_T - first_A[sequence_T]
    positions_T = (start_A[sequence_T] + offset_T) * (sequence_T < num_seqs - 1)
    slot_T = slot_A[sequence_T]
    block_tables, mappings = [], []
    for group, place in enumerate(pages.places):
        table_NP, page_size = pages.table(group, num_slots), place.page_size
        block_tables.append(table_NP[slot_A])
        mappings.append(table_NP[slot_T, positions_T // page_size].long() * page_size + positions_T % page_size)
    slot_RQ, position_RQ, row_RQ = (_block_rectangle if has_blocks else _verify_rectangle)(
        cut_5A[:, : rectangle[0]], first_A[: rectangle[0]], rectangle[1], num_rows, tables.null_slot
    )
    token_ids_T = tables.token_ids_NL[slot_T, positions_T]
    return RowLayout(
        token_ids_T=token_ids_T if block_mask is None else token_ids_T.masked_fill(offset_T > 0, block_mask),
        positions_T=positions_T,
        sequence_T=sequence_T,
        offset_T=offset_T,
        first_A=first_A,
        query_start_Z=torch.cat([first_A, end_A[-1:]]).to(torch.int32),
        kv_len_A=((start_A + count_A) * (count_A > 0)).to(torch.int32),
        kv_index_GT=torch.stack(mappings) if mappings else row_T.new_empty(0, num_rows),
        block_tables=tuple(block_tables),
        slot_RQ=slot_RQ,
        position_RQ=position_RQ,
        row_RQ=row_RQ,
    )


def _verify_rectangle(
    cut_5R: Tensor, first_R: Tensor, num_columns: int, num_rows: int, null_slot: int
) -> tuple[Tensor, Tensor, Tensor]:
    slot_R, start_R, known_R, drafts_R, chooses_R = cut_5R.unbind()
    offset_RQ = torch.arange(num_columns, device=slot_R.device).minimum(drafts_R[:, None])
    slot_R = torch.where(chooses_R > 0, slot_R, null_slot)
    last_known_R = first_R + (known_R - 1).clamp(min=0)
    row_RQ = (last_known_R[:, None] + offset_RQ).clamp(max=num_rows - 1)
    return slot_R[:, None].expand_as(offset_RQ), (start_R + known_R)[:, None] + offset_RQ, row_RQ


def _block_rectangle(
    cut_5R: Tensor, first_R: Tensor, num_columns: int, num_rows: int, null_slot: int
) -> tuple[Tensor, Tensor, Tensor]:
    slot_R, start_R = drafting(cut_5R, null_slot)
    offset_Q = torch.arange(1, num_columns + 1, device=slot_R.device)
    position_RQ = start_R[:, None] + offset_Q
    row_RQ = (first_R[:, None] + offset_Q).clamp(max=num_rows - 1)
    return slot_R[:, None].expand_as(position_RQ), position_RQ, row_RQ


def drafting(cut_5D: Tensor, null_slot: int) -> tuple[Tensor, Tensor]:
    """(slot, start), the null slot and 0 for sequences that have no room for a draft.

    In a padded shape that is also a prompt chunk's entry, behind whose rows stand tokens that must stay.
    """
    drafts = cut_5D[CutField.DRAFTS] > 0
    return torch.where(drafts, cut_5D[CutField.SLOT], null_slot), cut_5D[CutField.START] * drafts


def query_rows(
    cut_5A: Tensor, tables: SequenceTables, pages: PageTables, *, num_drafting: int, num_drafts: int, delta: int
) -> QueryLayout:
    """One query for each of the first `num_drafting` sequences, which sees the committed keys and no more.

    Args:
        cut_5A: by `CutField`.
        tables: the tokens.
        pages: block tables of the groups that are read.
        num_drafting: D.
        num_drafts: K.
        delta: from the newest token's position to the query's, which is 0 at least.
    """
    slot_D, start_D = drafting(cut_5A[:, :num_drafting], tables.null_slot)
    num_slots = len(tables.computed_N)
    offset_KO = torch.arange(1, num_drafts + 1, device=slot_D.device)[:, None]
    return QueryLayout(
        slot_D=slot_D,
        token_ids_D=tables.token_ids_NL[slot_D, start_D],
        positions_D=(start_D + delta).clamp(min=0),
        query_start_Z=torch.arange(num_drafting + 1, dtype=torch.int32, device=slot_D.device),
        kv_len_D=start_D.to(torch.int32),
        nothing_written_D=torch.zeros_like(slot_D),
        block_tables=tuple(pages.table(g, num_slots)[slot_D] for g in range(len(pages.places))),
        draft_position_KD=start_D + offset_KO,
    )
