"""What becomes of a cycle's rows once their tokens are chosen: accepted drafts, emitted ids, states that are kept.

Shape legend: A sequences of a cycle and the null slot behind them, R of them may choose tokens, Q most drafts of one
and one more, T rows, G KV groups, N slots, H width of a state, D drafts of one step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.sequence_tables import NOTHING, CutField, SequenceTables, Settled


def accepted_drafts(draft_ids_RK: Tensor, num_drafts_R: Tensor, chosen_ids_RQ: Tensor) -> tuple[Tensor, Tensor]:
    """How many leading drafts equal what was chosen before them, int64 [R], and the ids then emitted, -1 behind.

    Args:
        draft_ids_RK: int64, K = Q - 1; only the first `num_drafts_R` of each row count.
        num_drafts_R: int64.
        chosen_ids_RQ: int64; entries behind ``num_drafts_R`` do not count.
    """
    position_Q = torch.arange(chosen_ids_RQ.shape[1], device=draft_ids_RK.device)
    right_RK = (draft_ids_RK == chosen_ids_RQ[:, :-1]) & (position_Q[:-1] < num_drafts_R[:, None])
    accepted_R = right_RK.long().cumprod(dim=1).sum(dim=1)
    return accepted_R, chosen_ids_RQ.masked_fill(position_Q > accepted_R[:, None], -1)


def settle(
    cut_5A: Tensor, chosen_RQ: Tensor, tables: SequenceTables, verified: tuple[Tensor, Tensor] | None = None
) -> Settled:
    """Accept drafts that equal what was chosen in their place, and write what is emitted over them.

    Args:
        cut_5A: by `CutField`.
        chosen_RQ: int64: the token chosen behind the last known one of each of the first R sequences, and behind each
            of its drafts; -1 is none.
        tables: whose tokens are read and written.
        verified: what `accepted_drafts` would find, in its place.
    """
    num_choosing, num_columns = chosen_RQ.shape
    slot_R, start_R, known_R, drafts_R, chooses_R = cut_5A[:, :num_choosing].unbind()
    chooses_R1 = chooses_R[:, None] > 0
    slot_R1 = torch.where(chooses_R1, slot_R[:, None], tables.null_slot)
    offset_RQ = torch.arange(num_columns, device=slot_R.device).minimum(drafts_R[:, None])
    at = slot_R1, (start_R + known_R)[:, None] + offset_RQ
    tokens_RQ = tables.token_ids_NL[at]
    accepted_R, ids_RQ = verified or accepted_drafts(tokens_RQ[:, :-1], drafts_R, chosen_RQ)
    emitted_RQ = torch.where(ids_RQ >= 0, ids_RQ, tokens_RQ)
    # Padding names a sequence's last column again, so it must bring the same value.
    tables.token_ids_NL[at] = emitted_RQ.gather(1, offset_RQ)
    counts_R2 = torch.stack([drafts_R, accepted_R], dim=1) * chooses_R1
    accepted_A = torch.zeros_like(cut_5A[CutField.SLOT])
    accepted_A[:num_choosing] = counts_R2[:, 1]
    return Settled(accepted_A, ids_RQ, torch.cat([counts_R2, ids_RQ.masked_fill(~chooses_R1, NOTHING)], dim=1))


def advance(cut_5A: Tensor, accepted_A: Tensor, tables: SequenceTables) -> None:
    """Count the known rows and the accepted drafts as computed."""
    tables.computed_N.index_add_(0, cut_5A[CutField.SLOT], cut_5A[CutField.KNOWN] + accepted_A)


def write_drafts(ids: Tensor, slot: Tensor, position: Tensor, tables: SequenceTables) -> Tensor:
    """Put chosen drafts into the slot table; the same ids of any shape, with 0 in the place of negative ones.

    Args:
        ids: int64; negative where the drafter's logits were unusable: verification judges id 0 like any other.
        slot: int64, as `ids`; sequences that draft nothing name the null slot.
        position: int64, as `ids`.
        tables: whose tokens are written.
    """
    ids = ids.clamp(min=0)
    tables.token_ids_NL[slot, position] = ids
    return ids


def keep_last_rows(rows_TH: Tensor, cut_5A: Tensor, first_A: Tensor, accepted_A: Tensor, kept_NH: Tensor) -> None:
    """Keep, by slot, what stands in each sequence's last committed row; a sequence without one keeps what it has.

    Args:
        rows_TH: of a cycle's rows.
        cut_5A: by `CutField`.
        first_A: int64, index into T of each sequence's first row.
        accepted_A: int64, drafts.
        kept_NH: written, the null slot's entry to anything.
    """
    committed_A = cut_5A[CutField.KNOWN] + accepted_A
    row_A = (first_A + committed_A - 1).clamp(min=0)
    slot_A = torch.where(committed_A > 0, cut_5A[CutField.SLOT], len(kept_NH) - 1)
    kept_NH[slot_A] = rows_TH[row_A]


def committed_places(
    kv_index_GT: Tensor, sequence_T: Tensor, offset_T: Tensor, cut_5A: Tensor, accepted_A: Tensor
) -> Tensor:
    """Places in the pages, int64 [G, T], of which rows that were not committed write to the null page.

    Args:
        kv_index_GT: int64.
        sequence_T: int64, index into A.
        offset_T: int64, of a row within its sequence.
        cut_5A: by `CutField`.
        accepted_A: int64, drafts.
    """
    committed_A = cut_5A[CutField.KNOWN] + accepted_A
    return kv_index_GT.masked_fill(offset_T >= committed_A[sequence_T], 0)
