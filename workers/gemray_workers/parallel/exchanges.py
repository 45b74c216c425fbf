"""How far a rank has come with the collectives of a group.

Ranks of a group begin the same ones in the same order. So where they wait for each other, the one that has begun the
fewest is the one that did not come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec


class Exchanges(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's collectives in one group, at a moment."""

    group: str
    """The same name on every rank of the group."""
    begun: int
    """Since it joined, the one that it is in included."""
    inside: str | None
    """What its host waits in, or enqueues; None between two."""
    seconds: float
    """How long."""


class ExchangeCount:
    """Counts a rank's collectives. One thread has them, any may ask."""

    def __init__(self, group: str) -> None:
        """None yet, in the group of this name."""
        self._group = group
        self._begun = 0
        self._inside: tuple[str, float] | None = None

    def begin(self, verb: str, *, by_all: bool = True) -> float:
        """Be in one until `end`; the time now. What not all ranks do (`by_all`) is shown, not counted."""
        self._begun += by_all
        now = time.monotonic()
        self._inside = verb, now
        return now

    def end(self) -> None:
        """Be in none."""
        self._inside = None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count none meanwhile: nothing is exchanged, and other ranks may do more or less of it."""
        begun = self._begun
        try:
            yield
        finally:
            self._begun = begun

    def now(self) -> Exchanges:
        """Where the rank stands."""
        verb, since = self._inside or (None, 0.0)
        seconds = time.monotonic() - since if verb else 0.0
        return Exchanges(group=self._group, begun=self._begun, inside=verb, seconds=seconds)
