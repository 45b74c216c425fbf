"""Lossless verification of drafts: equality.

Row i of a sequence's verify rows (i = 0..K) yields t_i, the token that plain decoding would emit after the drafts
d_1..d_i: its logits were computed behind them and its noise is keyed by its position. So d_1 is right iff
d_1 == t_0, then d_2 iff d_2 == t_1, and so on; the first t that no draft matched is emitted in the drafts' place:

    n = number of leading i with d_{i+1} == t_i;   emit d_1 .. d_n, t_n      (which is t_0 .. t_n)

Whatever the drafts, the ids are those of plain decoding, and their law is the target's: accepting d with
probability p(d) and otherwise sampling from p without d is the same law (spec 7.3; Daliri, Musco, Suresh,
"Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978).

Shape legend: S sequences, K most drafts of a sequence, J = K + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gemray_kernels.reference.settled_rows import accepted_drafts


def count_accepted(draft_ids: Sequence[int], chosen_ids: Sequence[int]) -> int:
    """n for one sequence, 0 <= n <= len(draft_ids); it emits ``chosen_ids[: n + 1]``."""
    if len(chosen_ids) != len(draft_ids) + 1:
        raise ValueError(f"{len(draft_ids)} drafts have {len(draft_ids) + 1} verify rows, got {len(chosen_ids)}")
    for n, draft in enumerate(draft_ids):
        if draft != chosen_ids[n]:
            return n
    return len(draft_ids)


@dataclass(frozen=True)
class Verified:
    """What a verify step emits."""

    num_accepted_S: Tensor
    """int64; a sequence emits one token more."""
    ids_SJ: Tensor
    """int64: emitted ids, then -1."""


Accept = Callable[[Tensor, Tensor, Tensor], Verified]
"""Type of `verify`."""


def verify(draft_ids_SK: Tensor, num_drafts_S: Tensor, chosen_ids_SJ: Tensor) -> Verified:
    """`count_accepted` for many sequences without leaving the device.

    Args:
        draft_ids_SK: int64; only the first `num_drafts_S` of each row count.
        num_drafts_S: int64, 0 <= num_drafts <= K.
        chosen_ids_SJ: int64, t_0 .. t_K; entries behind ``num_drafts_S`` do not count.
    """
    return Verified(*accepted_drafts(draft_ids_SK, num_drafts_S, chosen_ids_SJ))
