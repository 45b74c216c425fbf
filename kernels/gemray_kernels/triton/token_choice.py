"""The local part of choosing tokens in Triton, one pass over the logits: `ReferenceKernels` for float32 and bfloat16.

Soft-cap, edits, noise and the best of each block of columns happen in registers; the vocabulary is written nowhere.
Candidates are found by their blocks: an id among the C largest lies in one of the C blocks whose own largest are the
largest, and is no smaller than the smallest of those. What fits that description, little more than C ids in general, is
listed by a second pass over C blocks at most, and a third kernel cuts the list.

A value and its id travel as one int64 that sorts as they do: larger values first, among equal ones the smaller id.

Shape legend: R rows, V local vocabulary columns, N blocks of columns, C candidates of a row, L listed ids of a row,
P ranks, W pairs that a rank offers for a row.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gemray_kernels.candidates import Candidates, local_top
from gemray_kernels.layout import require_contiguous, require_rows
from gemray_kernels.reference.token_choice import Cut, ReferenceKernels
from gemray_kernels.slot_tables import ChoiceRows, Columns
from gemray_kernels.triton import keyed_noise as triton_keyed_noise
from gemray_kernels.triton.choice_kernels import best_kernel, decide_kernel, edit_kernel, list_kernel, merge_kernel
from gemray_kernels.triton.choice_parts import NO_ID

MOST_LISTED = 64
"""Most candidates that are found by lists; more are cut from edited logits by torch's topk."""
MOST_MERGED = 1024
"""Most candidates of all ranks that one program sorts."""
MOST_BLOCKS = 256
MOST_COLUMNS = 2048
"""Columns of one block."""
BELOW_ONE = 1.0 - torch.finfo(torch.float32).eps / 2


class TritonKernels:
    """On CUDA; see `gemray_kernels.reference.token_choice.ChoiceKernels`."""

    def __init__(self) -> None:
        self._reference = ReferenceKernels(triton_keyed_noise.keyed_gumbel)

    def edited_logits(
        self, logits_RV: Tensor, rows: ChoiceRows, columns: Columns, softcap: float | None = None
    ) -> Tensor:
        """Logits as the distribution has them, float32 [R, V]."""
        tables = rows.tables
        if (tables.masks_MW, tables.occurrences_NV, tables.bias_NV, softcap) == (None, None, None, None):
            return logits_RV.float()
        edited_RV = torch.empty_like(logits_RV, dtype=torch.float32)
        block = 1024
        if edited_RV.numel():
            edit_kernel[len(logits_RV), triton.cdiv(logits_RV.shape[1], block)](
                edited_RV, *_arguments(logits_RV, rows, columns, softcap), BLOCK=block
            )
        return edited_RV

    def offer(
        self,
        logits_RV: Tensor,
        rows: ChoiceRows,
        columns: Columns,
        *,
        softcap: float | None,
        whole: bool,
        noise: bool,
        num_candidates: int,
        cut: Cut | None,
    ) -> Tensor:
        """What this rank offers, packed int64 [R, 1 for the best and one for each candidate]."""
        num_rows, num_columns = logits_RV.shape
        num_top = min(num_candidates, num_columns)
        offer_RW = torch.empty(num_rows, whole + num_top, dtype=torch.int64, device=logits_RV.device)
        if not num_rows:
            return offer_RW
        listed = 0 < num_candidates <= MOST_LISTED and num_candidates < num_columns
        if num_top and not listed:
            logits_RV = self.edited_logits(logits_RV, rows, columns, softcap)
            rows, softcap = rows.without_edits(), None
            _pack_into(offer_RW[:, whole:], local_top(logits_RV, columns.ids_V, num_candidates))
        if whole or listed:
            arguments = _arguments(logits_RV, rows, columns, softcap)
            block = _block_of(num_columns)
            num_blocks = triton.cdiv(num_columns, block)
            best_RN = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits_RV.device)
            # There in any case: a pointer that is there or not makes another program.
            num_listed_R = torch.empty(num_rows, dtype=torch.int32, device=logits_RV.device)
            best_kernel[num_rows, num_blocks](
                best_RN,
                num_listed_R,
                None if cut is None else cut.value_R,
                None if cut is None else cut.id_R,
                None if cut is None else cut.floor_R,
                *arguments,
                num_blocks,
                NOISE=noise,
                FILTERED=num_candidates > 0,
                BELOW_ONE=BELOW_ONE,
                BLOCK=block,
            )
            listed_RL = None
            if listed:
                listed_RL = best_RN.new_empty(num_rows, num_candidates * num_candidates)
                list_kernel[num_rows, num_blocks](
                    listed_RL,
                    num_listed_R,
                    best_RN,
                    *arguments,
                    num_blocks,
                    CANDIDATES=num_candidates,
                    BLOCKS=triton.next_power_of_2(num_blocks),
                    BLOCK=block,
                )
            merge_kernel[num_rows,](
                offer_RW,
                offer_RW.stride(0),
                best_RN,
                num_blocks,
                listed_RL,
                num_listed_R,
                WHOLE=whole,
                CANDIDATES=num_candidates,
                BLOCKS=triton.next_power_of_2(num_blocks),
                num_warps=1,
            )
        return offer_RW

    def decide(
        self, offers_PRW: Tensor, rows: ChoiceRows, *, whole: bool, num_candidates: int, dtype: torch.dtype
    ) -> Tensor:
        """The id of each row, int64 [R]."""
        num_ranks, num_rows, _ = offers_PRW.shape
        num_top = offers_PRW.shape[2] - whole
        width = triton.next_power_of_2(max(num_ranks * num_top, 1))
        if width > MOST_MERGED:
            pairs = _unpacked(offers_PRW)
            return self._reference.decide(pairs, rows, whole=whole, num_candidates=num_candidates, dtype=dtype)
        require_contiguous(slot=rows.slot_R, position=rows.position_R)
        ids_R = torch.empty(num_rows, dtype=torch.int64, device=offers_PRW.device)
        if num_rows:
            offers_PRW = offers_PRW.contiguous()
            decide_kernel[num_rows,](
                ids_R,
                offers_PRW,
                offers_PRW.stride(0),
                offers_PRW.stride(1),
                rows.tables.words_NF,
                rows.slot_R,
                rows.position_R,
                BELOW_ONE=BELOW_ONE,
                WHOLE=whole,
                RANKS=num_ranks,
                TOP=num_top,
                CANDIDATES=min(triton.next_power_of_2(num_candidates), width) if num_candidates else 0,
                WIDTH=width,
                num_warps=1 if width <= 128 else 4,
            )
        return ids_R


def _block_of(num_columns: int) -> int:
    """Columns of one block: as few as `MOST_BLOCKS` allow, for then few ids beyond the candidates are listed."""
    wanted: int = triton.next_power_of_2(triton.cdiv(num_columns, MOST_BLOCKS))
    return min(max(wanted, 64), MOST_COLUMNS)


def _arguments(logits_RV: Tensor, rows: ChoiceRows, columns: Columns, softcap: float | None) -> tuple[object, ...]:
    """What `edited` reads, in its order."""
    require_rows(logits=logits_RV)
    require_contiguous(slot=rows.slot_R, position=rows.position_R)
    tables, drafts_RB = rows.tables, rows.drafts_RB
    num_drafts = 0 if drafts_RB is None or tables.occurrences_NV is None else drafts_RB.shape[1]
    return (
        logits_RV,
        logits_RV.stride(0),
        logits_RV.shape[1],
        softcap,
        tables.words_NF,
        tables.masks_MW,
        0 if tables.masks_MW is None else tables.masks_MW.shape[1],
        tables.occurrences_NV,
        tables.bias_NV,
        rows.slot_R,
        rows.position_R,
        drafts_RB.contiguous() if drafts_RB is not None and num_drafts else None,
        num_drafts,
        columns.first_id,
        columns.num_ids,
        columns.added_column,
        columns.first_added_id,
        columns.num_added,
    )


def _pack_into(packed_RC: Tensor, offer: Candidates) -> None:
    """As `pack` does it."""
    values_RC = offer.values_RC + 0.0  # both zeros are one
    bits = values_RC.view(torch.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = torch.where(values_RC.isnan() | values_RC.isposinf(), 0x7FFFFFFF, key)
    low = torch.where(offer.ids_RC < 0, 0, NO_ID.value - offer.ids_RC)
    packed_RC.copy_((key.long() << 32) | low)


def _unpacked(packed: Tensor) -> Tensor:
    """Offers as the reference makes them."""
    key = (packed >> 32).int()
    values = (key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32)
    low = packed & NO_ID.value
    return torch.cat([values.double(), torch.where(low == 0, -1, NO_ID.value - low).double()], dim=-1)
