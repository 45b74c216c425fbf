"""Choosing the next token of each row: an argmax with keyed noise over a vocabulary that is split over ranks.

    token = argmax over v of  filter(logits_v / T) + g(seed, position, v),   g = 0 at T = 0

Its law is softmax of the filtered logits / T (Gumbel-max), and it depends on nothing but the row itself: not on the
batch, the number of ranks, or on whether a drafter guessed it (arXiv 2408.07978). Equal scores go to the smallest id.

Shape legend: R rows (of the step, or of one group), V local vocabulary columns, C candidates of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_kernels.candidates import Candidates, local_largest, local_top
from gemray_kernels.reference.keyed_noise import KeyedNoise, keyed_gumbel
from gemray_workers.parallel.communicator import Communicator, compute_dtype
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.vocab_parallel import gather_candidates
from support.oracles.sampling_oracle.edits import apply_edits
from support.oracles.sampling_oracle.filters import kept_by_filters, kept_by_min_p
from support.oracles.sampling_oracle.rows import SamplingRows

MIN_TEMPERATURE = 1e-20
"""Smaller positive temperatures are taken as this one, whose noise is already far below any gap between logits:
dividing by them would overflow float32."""


@dataclass(frozen=True)
class ChosenTokens:
    """The tokens chosen, the same on every rank."""

    ids_R: Tensor
    """int64; -1 where not `ok_R`."""
    ok_R: Tensor
    """bool: False where the logits hold NaN or +inf, or where every id is forbidden."""


def choose_tokens(
    logits_RV: Tensor,
    rows: SamplingRows,
    shard: ShardIndices,
    comm: Communicator,
    *,
    noise: KeyedNoise = keyed_gumbel,
) -> ChosenTokens:
    """Choose one token a row, after the rows' edits.

    One all-gather carries the candidates of all rows; a batch in which a row has min_p and neither top_k nor top_p
    needs one more before it, for the largest logits.

    Args:
        logits_RV: this rank's local columns [R, shard.num_elements_padded] before any edit; padding columns are -inf.
        rows: one entry a logits row, equal on every rank.
        shard: this rank's vocabulary.
        comm: the tensor-parallel ranks.
        noise: `keyed_gumbel`, or a faster function of the same values.
    """
    expected = (len(rows), shard.num_elements_padded)
    if logits_RV.shape != expected:
        raise ValueError(f"logits are {tuple(logits_RV.shape)}, expected {expected}: rows, local vocabulary columns")
    edited_RV = apply_edits(logits_RV.to(compute_dtype(logits_RV.dtype)), rows.edits, shard)
    sampler = _Sampler(edited_RV, rows, shard.global_ids(logits_RV.device), noise)
    groups = rows.groups

    offers: list[Candidates] = []
    if len(groups.greedy):
        offers.append(local_largest(edited_RV[groups.greedy], sampler.ids_V))
    if len(groups.noisy):
        scaled_RV = sampler.scaled(groups.noisy, edited_RV[groups.noisy])
        largest_R = comm.all_gather(scaled_RV.amax(dim=-1)).amax(dim=0) if groups.noisy_min_p else None
        offers.append(local_largest(sampler.noisy_scores(groups.noisy, scaled_RV, largest_R), sampler.ids_V))
    if len(groups.candidates):
        offers.append(local_top(edited_RV[groups.candidates], sampler.ids_V, groups.num_candidates))
    if len(groups.general):
        offers.append(Candidates(edited_RV[groups.general], sampler.ids_V.expand(len(groups.general), -1)))
    gathered = iter(gather_candidates(offers, comm) if offers else ())

    score_R = torch.full((len(rows),), -torch.inf, dtype=edited_RV.dtype, device=edited_RV.device)
    ids_R = torch.full_like(score_R, -1, dtype=torch.int64)
    for group in (groups.greedy, groups.noisy):
        if len(group):
            score_R[group], ids_R[group] = next(gathered).largest()
    if len(groups.candidates):
        best = next(gathered).sorted().first(groups.num_candidates)
        score_R[groups.candidates], ids_R[groups.candidates] = sampler.filtered_scores(
            groups.candidates, best
        ).largest()
    if len(groups.general):
        everything = next(gathered).sorted()
        score_R[groups.general], ids_R[groups.general] = sampler.filtered_scores(groups.general, everything).largest()

    ok_R = score_R.isfinite()
    return ChosenTokens(ids_R.masked_fill(~ok_R, -1), ok_R)


@dataclass(frozen=True)
class _Sampler:
    """Scores of a group of rows, without communication."""

    edited_RV: Tensor
    rows: SamplingRows
    ids_V: Tensor
    noise: KeyedNoise

    def scaled(self, group: Tensor, logits: Tensor) -> Tensor:
        """Logits / T, for logits [rows of the group, any]."""
        temperature_R = self.rows.temperature_R[group].clamp(min=MIN_TEMPERATURE)
        return logits / temperature_R.to(logits.dtype)[:, None]

    def noisy_scores(self, group: Tensor, scaled_RV: Tensor, largest_R: Tensor | None) -> Tensor:
        """Local columns plus noise; with the largest values given, min_p applies."""
        scores_RV = scaled_RV + self._noise(group, self.ids_V, scaled_RV.dtype)
        if largest_R is None:
            return scores_RV
        kept_RV = kept_by_min_p(scaled_RV, largest_R[:, None], self.rows.min_p_R[group, None])
        return scores_RV.masked_fill(~kept_RV, -torch.inf)

    def filtered_scores(self, group: Tensor, best: Candidates) -> Candidates:
        """Noisy scores of sorted candidates, -inf where a filter drops them."""
        scaled_RC = self.scaled(group, best.values_RC)
        rows = self.rows
        kept_RC = kept_by_filters(scaled_RC, rows.top_k_R[group], rows.top_p_R[group], rows.min_p_R[group])
        scores_RC = scaled_RC + self._noise(group, best.ids_RC, scaled_RC.dtype)
        return Candidates(scores_RC.masked_fill(~kept_RC, -torch.inf), best.ids_RC)

    def _noise(self, group: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self.noise(self.rows.seed_R[group], self.rows.position_R[group], ids.clamp(min=0), dtype)
