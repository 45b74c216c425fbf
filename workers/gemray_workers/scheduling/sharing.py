"""Max-min fair sharing of a step's rows."""

from __future__ import annotations

from collections.abc import Sequence


def fair_shares(budget: int, demands: Sequence[int]) -> list[int]:
    """Water-filling in whole rows: small demands are met, the rest is split evenly among the large.

    Rows that do not divide evenly go to the first in the list. The shares add up to min(budget, sum of demands), and
    with budget >= len(demands) nobody who asks is left without a row.
    """
    shares = [0] * len(demands)
    smallest_first = sorted(range(len(demands)), key=lambda index: (demands[index], -index))
    for num_served, index in enumerate(smallest_first):
        share = min(demands[index], budget // (len(demands) - num_served))
        shares[index] = share
        budget -= share
    return shares
