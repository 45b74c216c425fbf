"""The filters top_k, top_p and min_p, in this order, over candidates that are sorted by probability.

Shape legend: R rows, C candidates of a row, best first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kept_by_min_p(scaled: Tensor, largest_R1: Tensor, min_p_R1: Tensor) -> Tensor:
    """Where ``probability >= min_p * largest probability``, of logits already divided by T.

    Written as a sum: beside a NaN or +inf in its row, no finite logit is kept, even with min_p = 0.
    """
    return scaled >= largest_R1 + min_p_R1.log().to(scaled.dtype)


def kept_by_filters(scaled_RC: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Which candidates remain, bool [R, C].

    top_k keeps the first k (0: all). top_p keeps the shortest prefix of what is left whose renormalised mass
    reaches top_p, the candidate that crosses it included (1: all). min_p keeps probabilities of at least min_p
    times the largest. The best candidate always stays; in a row with a NaN or +inf no finite one does.

    Masses are summed in float64 whatever the dtype, so that the place of the cut does not depend on how many
    candidates (that is, which other rows) share the tensor.

    Args:
        scaled_RC: logits / T, descending.
        top_k_R: int64.
        top_p_R: float64, in (0, 1].
        min_p_R: float64, in [0, 1].
    """
    rank_C = torch.arange(scaled_RC.shape[-1], device=scaled_RC.device)
    in_top_k_RC = (rank_C < top_k_R[:, None]) | (top_k_R == 0)[:, None]
    largest_R1 = scaled_RC.amax(dim=-1, keepdim=True)
    weight_RC = (scaled_RC - largest_R1).double().exp() * in_top_k_RC
    mass_RC = weight_RC.cumsum(dim=-1)
    mass_before_RC = mass_RC - weight_RC
    in_top_p_RC = (mass_before_RC < top_p_R[:, None] * mass_RC[:, -1:]) | (top_p_R >= 1.0)[:, None]
    return in_top_k_RC & in_top_p_RC & kept_by_min_p(scaled_RC, largest_R1, min_p_R[:, None])
