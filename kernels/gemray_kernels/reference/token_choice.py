"""The local part of choosing tokens: edits, noise, the best ids of a rank's columns, filters over candidates.

    token = argmax over v of  filter(edited logits_v / T) + g(seed, position, v),   g = 0 at T = 0

Plain PyTorch, for every device and dtype; `triton.token_choice` gives the same in one pass over the logits. Shapes
follow from the arguments' shapes alone and nothing is read back, so all of it can be captured in a CUDA graph.

Edits come in this order: allowed ids, forbidden ids, repetition penalty (ids of prompt and output), presence and
frequency penalties (ids of the output), bias.

Shape legend: R rows, V local vocabulary columns, C candidates of a row, B ids (drafts) before a row, P ranks, W numbers
that a rank offers for a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gemray_kernels.candidates import Candidates, local_largest, local_top
from gemray_kernels.precision import compute_dtype
from gemray_kernels.reference.keyed_noise import KeyedNoise, keyed_gumbel
from gemray_kernels.slot_tables import PROMPT_SEEN, ChoiceRows, Columns, Field

MASS_ONE = float(1 << 44)
"""Probability masses are integers, the largest probability being this: sums are then the same in any order, on any
number of ranks, and 2**18 of them fit an int64."""


@dataclass(frozen=True)
class Cut:
    """Which ids of a row may be drawn from its whole vocabulary: those at or before one in the order of the filters,
    and of a scaled logit of at least `floor_R`."""

    value_R: Tensor
    """Edited logit of the last id that stays."""
    id_R: Tensor
    """int64: that id; among equal logits smaller ids come before it."""
    floor_R: Tensor


class ChoiceKernels(Protocol):
    """The three steps, each in the implementation of a device and dtype."""

    def edited_logits(
        self, logits_RV: Tensor, rows: ChoiceRows, columns: Columns, softcap: float | None = None
    ) -> Tensor:
        """Logits as the distribution has them [R, V], in the compute dtype. The input stays as it is (it is returned
        itself when there is nothing to do). With `softcap` the input is the head's bare product."""
        ...

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
        """What this rank offers, for `decide` to read [R, any]: the best of its columns, noise added, and its largest
        edited logits.

        A NaN or +inf among a row's edited logits makes the value of what is offered NaN or +inf, whatever the filters.

        Args:
            logits_RV: as for `edited_logits`; nothing is edited that is edited already.
            rows: one entry a logits row.
            columns: this rank's vocabulary.
            softcap: as for `edited_logits`.
            whole: offer the best.
            noise: whether a row among those that draw from the whole vocabulary is not greedy.
            num_candidates: offer so many of the largest; 0 for none.
            cut: of the whole vocabulary.
        """
        ...

    def decide(
        self, offers_PRW: Tensor, rows: ChoiceRows, *, whole: bool, num_candidates: int, dtype: torch.dtype
    ) -> Tensor:
        """The id of each row, int64 [R]; -1 where no value is finite.

        Greedy rows, and those with a top_k, take theirs from the candidates if there are any.

        Args:
            offers_PRW: every rank's offer.
            rows: as for `offer`, like the next two.
            whole: see there.
            num_candidates: see there.
            dtype: of the edited logits.
        """
        ...


class ReferenceKernels:
    """Plain PyTorch."""

    def __init__(self, noise: KeyedNoise = keyed_gumbel) -> None:
        """With `keyed_gumbel`, or a faster function of the same values."""
        self._noise = noise

    def edited_logits(
        self, logits_RV: Tensor, rows: ChoiceRows, columns: Columns, softcap: float | None = None
    ) -> Tensor:
        """The logits after every edit. Forbidding subtracts infinity rather than writing it: a NaN stays visible."""
        edited_RV = logits_RV.to(compute_dtype(logits_RV.dtype))
        tables = rows.tables
        if softcap is not None:
            edited_RV = torch.tanh(edited_RV / softcap) * softcap
            edited_RV = edited_RV.masked_fill(columns.ids_V < 0, -torch.inf)
        if tables.masks_MW is not None:
            forbidden_RV = _forbidden(tables.masks_MW, rows, edited_RV.shape[1])
            edited_RV = torch.where(forbidden_RV, edited_RV - torch.inf, edited_RV)
        if tables.occurrences_NV is not None:
            edited_RV = _penalised(edited_RV, _occurrences(tables.occurrences_NV, rows, columns), rows)
        if tables.bias_NV is not None:
            edited_RV = edited_RV + tables.bias_NV[rows.slot_R].to(edited_RV.dtype)
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
        """What this rank offers: values, then ids, as float64, which holds both exactly."""
        edited_RV = self.edited_logits(logits_RV, rows, columns, softcap)
        offers: list[Candidates] = []
        if whole:
            scores_RV = self._noisy(edited_RV, rows, columns, cut) if noise else edited_RV
            offers.append(local_largest(scores_RV, columns.ids_V))
        if num_candidates:
            offers.append(local_top(edited_RV, columns.ids_V, num_candidates))
        return torch.cat(
            [*(offer.values_RC.double() for offer in offers), *(offer.ids_RC.double() for offer in offers)], dim=1
        )

    def decide(
        self, offers_PRW: Tensor, rows: ChoiceRows, *, whole: bool, num_candidates: int, dtype: torch.dtype
    ) -> Tensor:
        """The id chosen from all ranks' offers."""
        values_RPW, ids_RPW = offers_PRW.transpose(0, 1).chunk(2, dim=-1)
        values_RPW, ids_RPW = values_RPW.to(dtype), ids_RPW.long()
        best = Candidates(values_RPW[:, :, 0], ids_RPW[:, :, 0])
        first = 1 if whole else 0
        top = Candidates(values_RPW[:, :, first:].flatten(1), ids_RPW[:, :, first:].flatten(1))
        if not num_candidates:
            return _usable(*best.largest())
        score_R, id_R = self.filtered(top, rows, num_candidates)
        if whole:
            from_top_R = rows.is_filtered | rows.is_greedy
            score_R, id_R = _where(from_top_R, (score_R, id_R), best.largest())
        return _usable(score_R, id_R)

    def filtered(self, gathered: Candidates, rows: ChoiceRows, num_candidates: int) -> tuple[Tensor, Tensor]:
        """(score_R, id_R) of rows with a top_k, and of greedy ones, from every rank's largest logits."""
        first = gathered.sorted().first(num_candidates)
        scaled_RC = rows.scaled(first.values_RC)
        noise_RC = self._noise(rows.integer(Field.SEED), rows.position_R, first.ids_RC.clamp(min=0), scaled_RC.dtype)
        scores_RC = (scaled_RC + noise_RC).masked_fill(~_kept_by_filters(scaled_RC, rows), -torch.inf)
        drawn = Candidates(scores_RC, first.ids_RC).largest()
        return _where(rows.is_greedy, (first.values_RC[:, 0], first.ids_RC[:, 0]), drawn)

    def _noisy(self, edited_RV: Tensor, rows: ChoiceRows, columns: Columns, cut: Cut | None) -> Tensor:
        """Scores over all columns; rows at T = 0 keep their logits."""
        ids_V = columns.ids_V
        scaled_RV = rows.scaled(edited_RV)
        scores_RV = scaled_RV + self._noise(
            rows.integer(Field.SEED), rows.position_R, ids_V.clamp(min=0), scaled_RV.dtype
        )
        if cut is not None:
            last_R1 = cut.value_R[:, None]
            stays_RV = (edited_RV > last_R1) | ((edited_RV == last_R1) & (ids_V <= cut.id_R[:, None]))
            stays_RV &= scaled_RV >= cut.floor_R[:, None]
            faulty_RV = edited_RV.isnan() | edited_RV.isposinf()
            scores_RV = scores_RV.masked_fill(~stays_RV, -torch.inf).masked_fill(faulty_RV, torch.nan)
        return torch.where(rows.is_greedy[:, None], edited_RV, scores_RV)


def mass_of(scaled_RC: Tensor, largest_R1: Tensor) -> Tensor:
    """Probability mass of logits / T as an integer, `MASS_ONE` for the row's largest one."""
    weight_RC = (scaled_RC - largest_R1).double().exp()
    return (weight_RC * MASS_ONE).round().long()


def _usable(score_R: Tensor, id_R: Tensor) -> Tensor:
    return torch.where(score_R.isfinite(), id_R, -1)


def _where(condition_R: Tensor, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.where(condition_R, one[0], other[0]), torch.where(condition_R, one[1], other[1])


def _kept_by_filters(scaled_RC: Tensor, rows: ChoiceRows) -> Tensor:
    """Which candidates, best first, top_k, top_p and min_p leave, in this order; bool [R, C].

    top_k keeps the first k. top_p keeps the shortest prefix of what is left whose renormalised mass reaches top_p,
    the candidate that crosses it included. min_p keeps probabilities of at least min_p times the largest. The best
    candidate always stays; in a row with a NaN or +inf no finite one does.
    """
    rank_C = torch.arange(scaled_RC.shape[-1], device=scaled_RC.device)
    top_p_R1 = rows.number(Field.TOP_P)[:, None]
    in_top_k_RC = rank_C < rows.number(Field.TOP_K)[:, None]
    largest_R1 = scaled_RC[:, :1]
    mass_RC = mass_of(scaled_RC, largest_R1) * in_top_k_RC
    reached_RC = mass_RC.cumsum(dim=-1)
    before_RC = (reached_RC - mass_RC).double()
    in_top_p_RC = (before_RC < top_p_R1 * reached_RC[:, -1:].double()) | (top_p_R1 >= 1.0)
    floor_R1 = largest_R1 + rows.number(Field.MIN_P).log()[:, None].to(scaled_RC.dtype)
    return in_top_k_RC & in_top_p_RC & (scaled_RC >= floor_R1)


def _forbidden(masks_MW: Tensor, rows: ChoiceRows, num_columns: int) -> Tensor:
    early_R = rows.position_R < rows.integer(Field.FREE_FROM)
    mask_R = torch.where(early_R, rows.integer(Field.EARLY_MASK), rows.integer(Field.LATE_MASK))
    bit = torch.arange(32, dtype=torch.int32, device=masks_MW.device)
    return ((masks_MW[mask_R][:, :, None] >> bit) & 1).flatten(1)[:, :num_columns].bool()


def _occurrences(occurrences_NV: Tensor, rows: ChoiceRows, columns: Columns) -> Tensor:
    """As the table has them, and the drafts before each row."""
    occurrences_RV = occurrences_NV[rows.slot_R]
    if rows.drafts_RB is None:
        return occurrences_RV
    column_RB, is_here_RB = columns.of_ids(rows.drafts_RB)
    return occurrences_RV.scatter_add_(1, column_RB, is_here_RB.to(occurrences_RV.dtype))


def _penalised(logits_RV: Tensor, occurrences_RV: Tensor, rows: ChoiceRows) -> Tensor:
    dtype = logits_RV.dtype
    repetition_R1 = rows.number(Field.REPETITION_PENALTY).to(dtype)[:, None]
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    edited_RV = torch.where(occurrences_RV != 0, repeated_RV, logits_RV)
    count_RV = occurrences_RV & (PROMPT_SEEN - 1)
    presence_R1 = rows.number(Field.PRESENCE_PENALTY)[:, None]
    penalty_RV = presence_R1 + rows.number(Field.FREQUENCY_PENALTY)[:, None] * count_RV
    return torch.where(count_RV > 0, edited_RV - penalty_RV.to(dtype), edited_RV)
