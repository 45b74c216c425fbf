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
"""Bits of an id in the widest vocabulary that can be cut: four million ids."""
ROWS_AT_A_TIME = 16
"""Rows that are worked on at once: working memory is about 40 bytes a column, 160 MiB in all, beside the edited
logits."""


def vocabulary_cut(
    edited_RV: Tensor, rows: ChoiceRows, columns: Columns, features: Features, comm: Communicator
) -> Cut:
    """Where to cut the vocabulary of the rows that draw from all of it; of other rows the answer is not used.

    One gather finds the largest logits. Each of top_p and a wide top_k costs seven sums over ranks for float32 logits
    and eleven for float64, both together one more.
    """
    temperature_R1 = rows.divisor(edited_RV.dtype)[:, None]
    largest_R = comm.all_gather((edited_RV.amax(dim=-1, keepdim=True) / temperature_R1)[:, 0]).amax(dim=0)
    floor_R = largest_R + rows.number(Field.MIN_P).log().to(largest_R.dtype)
    order = _Order(edited_RV, columns)
    last = order.end

    def ones(part: slice) -> Tensor:
        return torch.ones_like(edited_RV[part], dtype=torch.int64)

    def masses(part: slice) -> Tensor:
        return mass_of(edited_RV[part] / temperature_R1[part], largest_R[part, None])

    total_R: Tensor | None = None
    if features.wide_top_k:
        top_k_R = rows.number(Field.TOP_K)
        found = order.last_within(ones, lambda _: top_k_R, comm)
        last = _where(top_k_R > MAX_CANDIDATES, found, last)
        total_R = comm.all_reduce(order.sum_up_to(last, masses)) if features.top_p else None
    if features.top_p:
        top_p_R = rows.number(Field.TOP_P)
        found = order.last_within(
            masses, lambda sum_R: top_p_R * (sum_R if total_R is None else total_R).double(), comm
        )
        is_tighter_R = (found[0] > last[0]) | ((found[0] == last[0]) & (found[1] < last[1]))
        last = _where((top_p_R < 1) & is_tighter_R, found, last)
    return Cut(*last, floor_R)


_Last = tuple[Tensor, Tensor]
"""The last id that stays in each row: (its logit_R, its id_R)."""

_Amounts = Callable[[slice], Tensor]
"""What each id of some rows counts for: int64 >= 0 [R, V]."""


class _Order:
    """The ids of each row by logit, largest first, then by id, smallest first."""

    def __init__(self, edited_RV: Tensor, columns: Columns) -> None:
        self._edited_RV = edited_RV
        self._ids_V = columns.ids_V
        self._id_key_V = (2**ID_BITS - 1 - self._ids_V).clamp(max=2**ID_BITS - 1)
        num_rows = len(edited_RV)
        self._parts = [slice(i, min(i + ROWS_AT_A_TIME, num_rows)) for i in range(0, num_rows, ROWS_AT_A_TIME)]

    @property
    def end(self) -> _Last:
        """The last place in the order: nothing is cut."""
        value_R = self._edited_RV.new_full((len(self._edited_RV),), -torch.inf)
        return value_R, torch.full_like(value_R, 2**ID_BITS, dtype=torch.int64)

    def sum_up_to(self, last: _Last, amounts: _Amounts) -> Tensor:
        """Sum of the amounts of the ids up to and including `last`, int64 [R]."""
        sums = []
        for part in self._parts:
            edited_RV, value_R1, id_R1 = self._edited_RV[part], last[0][part, None], last[1][part, None]
            is_in_RV = (edited_RV > value_R1) | ((edited_RV == value_R1) & (self._ids_V <= id_R1))
            sums.append((amounts(part) * is_in_RV).sum(dim=-1))
        return torch.cat(sums)

    def last_within(self, amounts: _Amounts, target: Callable[[Tensor], Tensor], comm: Communicator) -> _Last:
        """The last id before which less than the target lies; one that counts for nothing is never it.

        Args:
            amounts: what ids count for.
            target: from the sum of all amounts of a row, int64 [R], to its target, float64 [R].
            comm: the ranks that hold the other columns.
        """
        zero_R = self._ids_V.new_zeros(len(self._edited_RV))
        above_R, value_R, id_R = zero_R, zero_R, zero_R
        target_R: Tensor | None = None
        num_bits = 8 * self._edited_RV.element_size()
        for shift, bits in _digits(num_bits):
            sums_RD = comm.all_reduce(self._sums_by_value(amounts, value_R, shift, bits, shift + bits == num_bits))
            if target_R is None:
                target_R = target(sums_RD.sum(dim=-1))
            digit_R, above_R = _last_digit(sums_RD, above_R, target_R)
            value_R = value_R | (digit_R << shift)
        assert target_R is not None
        for shift, bits in _digits(ID_BITS):
            sums_RD = comm.all_reduce(self._sums_by_id(amounts, value_R, id_R, shift, bits))
            digit_R, above_R = _last_digit(sums_RD, above_R, target_R)
            id_R = id_R | (digit_R << shift)
        return _float_of(value_R, self._edited_RV.dtype), 2**ID_BITS - 1 - id_R

    def _sums_by_value(self, amounts: _Amounts, value_R: Tensor, shift: int, bits: int, is_first: bool) -> Tensor:
        """By one digit of the value, among the ids whose digits before it are those of `value_R`."""
        sums_RD = value_R.new_zeros(len(value_R), 1 << bits)
        for part in self._parts:
            key_RV = _ascending_integer(self._edited_RV[part])
            amount_RV = amounts(part) * (self._ids_V >= 0)
            if not is_first:
                amount_RV *= (key_RV >> (shift + bits)) == (value_R[part, None] >> (shift + bits))
            sums_RD[part].scatter_add_(1, (key_RV >> shift) & ((1 << bits) - 1), amount_RV)
        return sums_RD

    def _sums_by_id(self, amounts: _Amounts, value_R: Tensor, id_R: Tensor, shift: int, bits: int) -> Tensor:
        """By one digit of the id, among the ids of one value whose digits before it are those of `id_R`."""
        sums_RD = value_R.new_zeros(len(value_R), 1 << bits)
        digit_V = (self._id_key_V >> shift) & ((1 << bits) - 1)
        for part in self._parts:
            amount_RV = amounts(part) * (self._ids_V >= 0)
            amount_RV *= _ascending_integer(self._edited_RV[part]) == value_R[part, None]
            amount_RV *= (self._id_key_V >> (shift + bits)) == (id_R[part, None] >> (shift + bits))
            sums_RD[part].scatter_add_(1, digit_V.expand_as(amount_RV), amount_RV)
        return sums_RD


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
    """int64 whose 32 or 64 bits, taken as unsigned, are in the order of the floats; both zeros are one."""
    if values.dtype == torch.float64:
        bits = (values + 0.0).view(torch.int64)
        return bits ^ ((bits >> 63) | torch.iinfo(torch.int64).min)
    bits = (values + 0.0).view(torch.int32).long()
    return (bits ^ ((bits >> 31) | -(2**31))) & (2**32 - 1)


def _float_of(integer: Tensor, dtype: torch.dtype) -> Tensor:
    """The float whose `_ascending_integer` this is."""
    if dtype == torch.float64:
        return (integer ^ (~(integer >> 63) | torch.iinfo(torch.int64).min)).view(dtype)
    bits = integer ^ torch.where(integer >= 2**31, 2**31, 2**32 - 1)
    return torch.where(bits >= 2**31, bits - 2**32, bits).int().view(dtype)


def _where(condition_R: Tensor, one: _Last, other: _Last) -> _Last:
    return torch.where(condition_R, one[0], other[0]), torch.where(condition_R, one[1], other[1])
