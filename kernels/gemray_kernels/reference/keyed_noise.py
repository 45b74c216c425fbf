"""Noise that is a function of (seed, position, token id) and of nothing else: the heart of lossless sampling.

A token is chosen as ``argmax_v(logits_v / T + g(seed, position, v))`` with Gumbel noise g (Gumbel-max). As g does
not depend on the batch, the rank, the drafter or the time, neither does the choice.

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Torch has no
unsigned 32-bit arithmetic, so words are int64 tensors with values in [0, 2**32); products wrap modulo 2**64, from
which both halves are exact.

Shape legend: R rows, K ids of one row, V ids common to all rows, Q groups of four ids.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Word: TypeAlias = Tensor
"""int64 with values in [0, 2**32)."""

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


class KeyedNoise(Protocol):
    """The signature of `keyed_gumbel`, which its accelerated twins share."""

    def __call__(self, seed_R: Tensor, position_R: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Noise [R, number of ids a row]."""
        ...


def philox4x32(key: tuple[Word, Word], counter: tuple[Word, Word, Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Four random words for each (key, counter); the six inputs broadcast against each other."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for round_number in range(NUM_ROUNDS):
        if round_number > 0:
            k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        # The shift is arithmetic; the mask drops the copies of the sign bit.
        high0, high1 = (product0 >> 32) & MASK, (product1 >> 32) & MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & MASK, high0 ^ c3 ^ k1, product0 & MASK
    return c0, c1, c2, c3


def keyed_gumbel(seed_R: Tensor, position_R: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise of each (row, id).

    The word of id v at position p under a seed is lane ``v % 4`` of Philox4x32-10 with

        key = (seed & 0xFFFFFFFF, seed >> 32),  counter = (p & 0xFFFFFFFF, p >> 32, v // 4, 0).

    This order is part of what a seed means: changing it changes every sampled answer.

    Args:
        seed_R: int64 [R], the bits of a uint64 seed.
        position_R: int64 [R], absolute position of the token to be chosen, >= 0.
        token_ids: int64 [R, K], or [V] when all rows want the same ids; each >= 0.
        dtype: float32 or float64, in which the noise is computed.

    Returns:
        [R, K] or [R, V] of `dtype`, always finite.
    """
    key = (_low(seed_R)[:, None], _high(seed_R)[:, None])
    low_R1, high_R1 = _low(position_R)[:, None], _high(position_R)[:, None]
    zero = torch.zeros((), dtype=torch.int64, device=token_ids.device)
    if token_ids.dim() == 1:
        # Neighbouring ids share a counter: one Philox call serves a group of four.
        group_Q, group_of_V = torch.unique_consecutive(token_ids >> 2, return_inverse=True)
        words_RQ4 = torch.stack(philox4x32(key, (low_R1, high_R1, group_Q[None], zero)), dim=-1)
        return gumbel_of_word(words_RQ4.flatten(1)[:, 4 * group_of_V + (token_ids & 3)], dtype)
    words_RK4 = torch.stack(philox4x32(key, (low_R1, high_R1, token_ids >> 2, zero)), dim=-1)
    return gumbel_of_word(words_RK4.gather(-1, (token_ids & 3)[..., None])[..., 0], dtype)


def gumbel_of_word(word: Word, dtype: torch.dtype) -> Tensor:
    """Map uniform words to Gumbel noise: ``g = -log(-log(1 - w))`` with ``w = (word + 0.5) / 2**32`` in (0, 1).

    1 - w is as uniform as w, and small words give the large noise that an argmax looks at: there log1p keeps full
    precision (up to g = 22.9), where -log(-log(w)) in float32 would be coarse near w = 1 and infinite at it.
    """
    below_one = 1.0 - torch.finfo(dtype).eps / 2
    w = ((word.to(dtype) + 0.5) * 2.0**-32).clamp(max=below_one)
    return -torch.log(-torch.log1p(-w))


def _low(x: Tensor) -> Word:
    return x & MASK


def _high(x: Tensor) -> Word:
    return (x >> 32) & MASK
