"""Log-probabilities under the model's own distribution: before edits, temperature and filters.

Shape legend: R rows, V local vocabulary columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.candidates import Candidates, local_top
from gemray_workers.parallel.communicator import Communicator, compute_dtype
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.token_logprob import TokenLogprob
from gemray_workers.sampling.vocab_parallel import gather_candidates


def token_logprobs(
    logits_RV: Tensor, token_ids_R: Tensor, top_n: int, shard: ShardIndices, comm: Communicator
) -> list[TokenLogprob]:
    """Log-softmax at each row's token and at the row's `top_n` most likely ids, equal on every rank.

    One all-gather of 2 + `top_n` pairs a row; logits never leave their rank.

    Args:
        logits_RV: this rank's local columns [R, shard.num_elements_padded], unedited; padding columns are -inf.
        token_ids_R: int64, ids of the vocabulary.
        top_n: >= 0; fewer come back when the vocabulary is smaller. Equal ones come by id.
        shard: this rank's vocabulary.
        comm: the tensor-parallel ranks.
    """
    if not len(token_ids_R):
        return []
    logits_RV = logits_RV.to(compute_dtype(logits_RV.dtype))
    column_R, held_R = shard.local_rows(token_ids_R)
    logit_R = logits_RV.gather(-1, column_R[:, None])[:, 0].masked_fill(~held_R, -torch.inf)
    offers = [
        Candidates(logits_RV.logsumexp(dim=-1, keepdim=True), torch.full_like(token_ids_R, -1)[:, None]),
        Candidates(logit_R[:, None], token_ids_R[:, None]),
        local_top(logits_RV, shard.global_ids(logits_RV.device), top_n),
    ]
    normalisers, token, best = gather_candidates(offers, comm)
    normaliser_R1 = normalisers.values_RC.logsumexp(dim=-1, keepdim=True)
    logprob_R1 = token.values_RC.amax(dim=-1, keepdim=True) - normaliser_R1
    top = best.sorted().first(top_n)
    top_logprob_RC = top.values_RC - normaliser_R1
    return [
        TokenLogprob(token_id, logprob, [(i, value) for i, value in zip(top_ids, top_logprobs, strict=True) if i >= 0])
        for token_id, (logprob,), top_ids, top_logprobs in zip(
            token_ids_R.tolist(), logprob_R1.tolist(), top.ids_RC.tolist(), top_logprob_RC.tolist(), strict=True
        )
    ]
