"""Log-probabilities under the model's own distribution: before edits, temperature and filters.

The sum of a softmax is one of integers (`mass_of`), so that it does not depend on its order: neither the number of
ranks nor that of rows changes a bit of what is reported.

Shape legend: R rows, V local vocabulary columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_kernels.candidates import Candidates, local_top
from gemray_kernels.reference.token_choice import MASS_ONE, mass_of
from gemray_workers.parallel.communicator import Communicator, compute_dtype
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.token_logprob import TokenLogprob
from gemray_workers.sampling.vocab_parallel import gather_candidates

_ROWS_AT_A_TIME = 16
_ROWS_SEARCHED_AT_A_TIME = 32
"""Rows whose most likely tokens are found at once; each takes ten bytes a column."""


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of some rows, on the device."""

    token_ids_R: Tensor
    logprob_R: Tensor
    top: Candidates
    """Log-probabilities and ids of the most likely tokens, best first [R, C]; id -1 where the vocabulary ends."""

    def listed(self, checksum_R: Tensor | None = None) -> list[TokenLogprob]:
        """As they are reported: 2.5 KB a row with 20 of the most likely. Waits for the device.

        Args:
            checksum_R: int64, of each row's logits, if they are to be told.
        """
        checksums = [None] * len(self.token_ids_R) if checksum_R is None else [c % 2**64 for c in checksum_R.tolist()]
        return [
            TokenLogprob(
                token_id, logprob, [(i, value) for i, value in zip(ids, values, strict=True) if i >= 0], checksum
            )
            for token_id, logprob, ids, values, checksum in zip(
                self.token_ids_R.tolist(),
                self.logprob_R.tolist(),
                self.top.ids_RC.tolist(),
                self.top.values_RC.tolist(),
                checksums,
                strict=True,
            )
        ]


def token_logprobs(
    logits_RV: Tensor, token_ids_R: Tensor, top_n: int, shard: ShardIndices, comm: Communicator
) -> RowLogprobs:
    """Log-softmax at each row's token and at the row's `top_n` most likely ids, equal on every rank.

    One all-gather of 2 + `top_n` pairs a row, and one sum of an int64; logits never leave their rank.

    Args:
        logits_RV: this rank's local columns [R, shard.num_elements_padded], unedited; padding columns are -inf.
        token_ids_R: int64, ids of the vocabulary.
        top_n: >= 0; fewer come back when the vocabulary is smaller. Equal ones come by id.
        shard: this rank's vocabulary.
        comm: the tensor-parallel ranks.
    """
    logits_RV = logits_RV.to(compute_dtype(logits_RV.dtype))
    column_R, held_R = shard.local_rows(token_ids_R)
    logit_R = logits_RV.gather(-1, column_R[:, None])[:, 0].masked_fill(~held_R, -torch.inf)
    offers = [
        Candidates(logits_RV.amax(dim=-1, keepdim=True), torch.full_like(token_ids_R, -1)[:, None]),
        Candidates(logit_R[:, None], token_ids_R[:, None]),
        _most_likely(logits_RV, shard.global_ids(logits_RV.device), top_n),
    ]
    largest, token, best = gather_candidates(offers, comm)
    largest_R1 = largest.values_RC.amax(dim=-1, keepdim=True)
    log_mass_R1 = comm.all_reduce(_mass(logits_RV, largest_R1)).double().div(MASS_ONE).log()[:, None]

    def logprob(logits_RC: Tensor) -> Tensor:
        return (logits_RC.double() - largest_R1.double() - log_mass_R1).to(logits_RV.dtype)

    top = best.sorted().first(top_n)
    token_R1 = token.values_RC.amax(dim=-1, keepdim=True)
    return RowLogprobs(token_ids_R, logprob(token_R1)[:, 0], Candidates(logprob(top.values_RC), top.ids_RC))


def _most_likely(logits_RV: Tensor, ids_V: Tensor, top_n: int) -> Candidates:
    parts = [local_top(part_RV, ids_V, top_n) for part_RV in torch.split(logits_RV, _ROWS_SEARCHED_AT_A_TIME)]
    return Candidates(torch.cat([part.values_RC for part in parts]), torch.cat([part.ids_RC for part in parts]))


def _mass(logits_RV: Tensor, largest_R1: Tensor) -> Tensor:
    """Sum over this rank's columns of ``exp(logit - largest)`` in units of 1 / `MASS_ONE`, int64 [R]; a few rows at a
    time, as each takes 16 bytes a column."""
    parts = zip(torch.split(logits_RV, _ROWS_AT_A_TIME), torch.split(largest_R1, _ROWS_AT_A_TIME), strict=True)
    return torch.cat([mass_of(part_RV, part_R1).sum(dim=-1) for part_RV, part_R1 in parts])
