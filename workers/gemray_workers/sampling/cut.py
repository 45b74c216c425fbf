"""What filters leave of a whole vocabulary that is split over ranks: its last id, found digit by digit.

Ids are ordered by edited logit, then by id, and both are integers of a few digits. For each digit, first ones first,
the ranks add up how much (ids for top_k, probability mass for top_p) falls on each of its values among the ids that
share the digits found so far; where the sum from above reaches the target, there is the last id that stays. Nothing is
sorted or gathered, and a digit costs one sum over ranks of 256 int64 a row, whatever the logits.

Sums are of integers, so the place of the cut depends neither on their order nor on the number of ranks.

Shape legend: R rows, V local vocabulary columns, D values of a digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gemray_kernels.reference.token_choice import Cut, mass_of
from gemray_kernels.slot_tables import MAX_CANDIDATES, ChoiceRows, Columns, Field
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.sampling.features import Features

DIGIT_BITS = 8
ID_BITS = 22
"""Of the widest vocabulary that can be cut: four million ids."""


def vocabulary_cut(
    edited_RV: Tensor, rows: ChoiceRows, columns: Columns, features: Features, comm: Communicator
) -> Cut:
    """Where to cut the vocabulary of the rows that draw from all of it; of other rows the answer is not used.

    One gather finds the largest logits. Each of top_p and a wide top_k costs seven sums over ranks for float32 logits
    and eleven for float64, both together one more.
    """
    scaled_RV = rows.scaled(edited_RV)
    largest_R = comm.all_gather(scaled_RV.amax(dim=-1)).amax(dim=0)
    floor_R = largest_R + rows.number(Field.MIN_P).log().to(largest_R.dtype)
    order = _Order(edited_RV, columns)
    last = order.end
    mass_RV = mass_of(scaled_RV, largest_R[:, None])
    total_R: Tensor | None = None
    if features.wide_top_k:
        top_k_R = rows.number(Field.TOP_K)
        found = order.last_within(torch.ones_like(mass_RV), lambda _: top_k_R, comm)
        last = _where(top_k_R > MAX_CANDIDATES, found, last)
        total_R = comm.all_reduce((mass_RV * order.up_to(last)).sum(dim=-1)) if features.top_p else None
    if features.top_p:
        top_p_R = rows.number(Field.TOP_P)
        found = order.last_within(
            mass_RV, lambda sum_R: top_p_R * (sum_R if total_R is None else total_R).double(), comm
        )
        is_tighter_R = (found[0] > last[0]) | ((found[0] == last[0]) & (found[1] < last[1]))
        last = _where((top_p_R < 1) & is_tighter_R, found, last)
    return Cut(*last, floor_R)


_Last = tuple[Tensor, Tensor]
"""The last id that stays in each row: (its logit_R, its id_R)."""


class _Order:
    """The ids of each row by logit, largest first, then by id, smallest first."""

    def __init__(self, edited_RV: Tensor, columns: Columns) -> None:
        self._edited_RV = edited_RV
        self._ids_V = columns.ids_V

    @property
    def end(self) -> _Last:
        """The end of the order, behind which nothing lies."""
        value_R = self._edited_RV.new_full((len(self._edited_RV),), -torch.inf)
        return value_R, torch.full_like(value_R, 2**ID_BITS, dtype=torch.int64)

    def up_to(self, last: _Last) -> Tensor:
        """Where ids come before `last` or are it, bool [R, V]."""
        value_R1, id_R1 = last[0][:, None], last[1][:, None]
        return (self._edited_RV > value_R1) | ((self._edited_RV == value_R1) & (self._ids_V <= id_R1))

    def last_within(self, amount_RV: Tensor, target: Callable[[Tensor], Tensor], comm: Communicator) -> _Last:
        """The last id before which less than the target lies.

        Args:
            amount_RV: int64 >= 0, what each id counts for. An id that counts nothing is never the last.
            target: from the sum of all amounts of a row, int64 [R], to its target, float64 [R].
            comm: the ranks that hold the other columns.
        """
        rank_of_value_RV = _ascending_integer(self._edited_RV)
        rank_of_id_V = (2**ID_BITS - 1 - self._ids_V).clamp(max=2**ID_BITS - 1)
        open_RV = (self._ids_V >= 0).expand_as(amount_RV)
        above_R = amount_RV.new_zeros(len(amount_RV))
        target_R: Tensor | None = None
        found: list[Tensor] = []
        for key, num_bits in ((rank_of_value_RV, 8 * self._edited_RV.element_size()), (rank_of_id_V, ID_BITS)):
            key_R = torch.zeros_like(above_R)
            for shift, bits in _digits(num_bits):
                digit_RV = ((key >> shift) & ((1 << bits) - 1)).expand_as(amount_RV)
                sums_RD = amount_RV.new_zeros(len(amount_RV), 1 << bits)
                sums_RD = comm.all_reduce(sums_RD.scatter_add_(1, digit_RV, amount_RV * open_RV))
                if target_R is None:
                    target_R = target(sums_RD.sum(dim=-1))
                digit_R, above_R = _last_digit(sums_RD, above_R, target_R)
                key_R = key_R | (digit_R << shift)
                open_RV = open_RV & (digit_RV == digit_R[:, None])
            found.append(key_R)
        return _float_of(found[0], self._edited_RV.dtype), 2**ID_BITS - 1 - found[1]


def _last_digit(sums_RD: Tensor, above_R: Tensor, target_R: Tensor) -> tuple[Tensor, Tensor]:
    """(the smallest digit of which a part stays, what lies above it): largest digits come first."""
    falling_RD = sums_RD.flip(1)
    before_RD = above_R[:, None] + falling_RD.cumsum(dim=-1) - falling_RD
    stays_RD = (falling_RD > 0) & (before_RD.double() < target_R[:, None])
    place_D = torch.arange(sums_RD.shape[1], device=sums_RD.device)
    place_R = (stays_RD * place_D).amax(dim=-1)
    return sums_RD.shape[1] - 1 - place_R, before_RD.gather(1, place_R[:, None])[:, 0]


def _digits(num_bits: int) -> Iterator[tuple[int, int]]:
    """(shift, bits) of each digit, from the first on."""
    while num_bits > 0:
        bits = min(DIGIT_BITS, num_bits)
        num_bits -= bits
        yield num_bits, bits


def _ascending_integer(values: Tensor) -> Tensor:
    """int64 whose lowest 32 or 64 bits, taken as unsigned, are in the order of the floats; both zeros are one."""
    if values.dtype == torch.float64:
        bits = (values + 0.0).view(torch.int64)
        return bits ^ ((bits >> 63) | torch.iinfo(torch.int64).min)
    bits = (values + 0.0).view(torch.int32).long()
    return bits ^ ((bits >> 31) | -(2**31))


def _float_of(integer: Tensor, dtype: torch.dtype) -> Tensor:
    """The float whose `_ascending_integer` this is."""
    if dtype == torch.float64:
        return (integer ^ (~(integer >> 63) | torch.iinfo(torch.int64).min)).view(dtype)
    bits = integer ^ torch.where(integer >= 2**31, 2**31, 2**32 - 1)
    return torch.where(bits >= 2**31, bits - 2**32, bits).int().view(dtype)


def _where(condition_R: Tensor, one: _Last, other: _Last) -> _Last:
    return torch.where(condition_R, one[0], other[0]), torch.where(condition_R, one[1], other[1])
