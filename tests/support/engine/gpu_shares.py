"""How the workers of pytest-xdist share the cards of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

BYTES_EACH = 16 << 30
"""Memory of a card that a worker may want: tests hold up to 12 layers of 31B, and their pages."""
CORES_EACH = 2
"""A test on a card compiles programs for most of its time."""


def num_workers(card_bytes: Sequence[int], num_cores: int) -> int:
    """As many workers as cards and cores have room for; one at least.

    Args:
        card_bytes: the memory of each card.
        num_cores: of the machine.
    """
    return max(1, min(sum(total // BYTES_EACH for total in card_bytes), num_cores // CORES_EACH))


def cards_of_worker(cards: Sequence[str], worker: str) -> list[str]:
    """The cards in the order in which a worker sees them: the next worker's tests on one card take the next card.

    Args:
        cards: as CUDA_VISIBLE_DEVICES names them.
        worker: as pytest-xdist calls it, "gw3".
    """
    first = int(worker.removeprefix("gw")) % len(cards) if cards else 0
    return [*cards[first:], *cards[:first]]


def spread(gangs: Sequence[T], others: Sequence[T]) -> list[T]:
    """Tests of gangs, which wait for each other's cards, evenly among the others: always one, while few workers wait.

    Args:
        gangs: what the order begins with; longest first.
        others: tests on one card.
    """
    every = len(others) // max(1, len(gangs))
    mixed: list[T] = []
    for place, gang in enumerate(gangs):
        mixed += [gang, *others[place * every : (place + 1) * every]]
    return mixed + list(others[len(gangs) * every :])
