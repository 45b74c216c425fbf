"""What tests of several processes that share cards must not do beside each other.

- Nothing on the cards of a gang of several: collectives spin on a card until every peer has come, and ranks of two
  gangs that share cards keep each other's peers from coming, until NCCL gives up. One has hung beside tests of single
  cards as well (`benchmarks/results/2026-11-30-h200-two-cards`). Gangs over different cards run side by side.
- Nothing beside a test that measures how much of a card's memory is free and takes it all.

A card is known by the name that CUDA_VISIBLE_DEVICES has for it, its number where that isn't set. It has others (a
UUID), so runs that go on at one time must name cards in one way.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def card_memory(cards: Iterable[str], *, to_itself: bool, directory: Path | None = None) -> Iterator[None]:
    """Take memory of these cards as others do, or alone: wait for whoever may not take any meanwhile.

    Who waits for a card to itself is not overtaken: a test that comes later waits behind it.

    Args:
        cards: by name.
        to_itself: whether no other process may hold their memory in here.
        directory: of the locks' files; the machine's temporary one by default.
    """
    directory = directory or Path(tempfile.gettempdir())
    with ExitStack() as held:
        for card in sorted(set(cards)):
            name = f"gemray-card-{card.replace('/', '-')}-memory"
            with _locked(directory / f"{name}-next.lock", fcntl.LOCK_EX):
                kind = fcntl.LOCK_EX if to_itself else fcntl.LOCK_SH
                held.enter_context(_locked(directory / f"{name}.lock", kind))
        yield


class HeldCards:
    """The cards that the running test takes memory of, as others do, and for a while alone."""

    def __init__(self, directory: Path | None = None) -> None:
        """Hold none yet; `directory` as of `card_memory`."""
        self._directory = directory
        self._cards: tuple[str, ...] = ()
        self._to_itself = False
        self._lock = ExitStack()

    @contextmanager
    def held(self, cards: Iterable[str], *, to_itself: bool) -> Iterator[None]:
        """As `card_memory`, while a test runs."""
        self._cards, self._to_itself = tuple(cards), to_itself
        self._take()
        try:
            yield
        finally:
            self._lock.close()

    @contextmanager
    def alone(self, num_cards: int) -> Iterator[None]:
        """Let the cards go and take them again when no other test has them, which then wait; share them again behind.

        Whoever waits holds none meanwhile, so that two tests can't wait for each other.

        Args:
            num_cards: how many the test computes on, each of them held.

        Raises:
            ValueError: the test holds fewer, and others would compute beside it.
        """
        if num_cards > len(self._cards):
            raise ValueError(
                f"{num_cards} cards for a test that holds {len(self._cards)}: its mark `cards` says how many"
            )
        if self._to_itself:
            yield
            return
        self._lock.close()
        try:
            with card_memory(self._cards, to_itself=True, directory=self._directory):
                yield
        finally:
            self._take()

    def _take(self) -> None:
        self._lock.enter_context(card_memory(self._cards, to_itself=self._to_itself, directory=self._directory))


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    """Hold the file's lock; closing the file gives it back."""
    with path.open("a") as file:
        fcntl.flock(file, kind)
        yield
