"""What tests of several processes that share cards must not do beside each other.

- One gang over several cards at a time, and nothing else on its cards meanwhile: collectives spin on a card until every
  peer has come, and ranks of two gangs that share cards keep each other's peers from coming, until NCCL gives up. One
  has hung beside tests of single cards as well (`benchmarks/results/2026-11-30-h200-two-cards`).
- Nothing beside a test that measures how much of a card's memory is free and takes it all.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

MACHINE_LOCK = "gemray-cards.lock"


@contextmanager
def cards_to_itself(directory: Path | None = None, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Wait until no other gang holds a card that this process sees, and hold them; a process that dies lets go.

    Where CUDA_VISIBLE_DEVICES lists cards by number, gangs over other cards of the machine may run beside this one.
    Without it, and where it names cards in another way (one card has several names), all cards count as seen.

    Args:
        directory: of the locks' files; the machine's temporary one by default.
        environment: where CUDA_VISIBLE_DEVICES is read.
    """
    directory = directory or Path(tempfile.gettempdir())
    cards = numbered_cards(environment.get("CUDA_VISIBLE_DEVICES"))
    with ExitStack() as held:
        held.enter_context(_locked(directory / MACHINE_LOCK, fcntl.LOCK_EX if cards is None else fcntl.LOCK_SH))
        # In ascending order, whatever order they are listed in: two that want the same cards can't wait for each other.
        for card in sorted(cards or ()):
            held.enter_context(_locked(directory / card_lock(card), fcntl.LOCK_EX))
        yield


@contextmanager
def card_memory(cards: Iterable[str], *, to_itself: bool, directory: Path | None = None) -> Iterator[None]:
    """Take memory of these cards as others do, or alone: wait for whoever may not take any meanwhile.

    Who waits for a card to itself is not overtaken: a test that comes later waits behind it.

    Args:
        cards: as CUDA_VISIBLE_DEVICES names them, each in one way.
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
    def alone(self) -> Iterator[None]:
        """Let the cards go and take them again when no other test has them, which then wait; share them again behind.

        Whoever waits holds none meanwhile, so that two tests can't wait for each other.
        """
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


def numbered_cards(visible: str | None) -> set[int] | None:
    """Cards that CUDA_VISIBLE_DEVICES = `visible` lists by number; None where it isn't set or names any otherwise."""
    if visible is None:
        return None
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return {int(name) for name in names} if all(name.isdecimal() for name in names) else None


def card_lock(card: int) -> str:
    """Name of the file that whoever holds `card` alone has locked."""
    return f"gemray-card-{card}.lock"


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    """Hold the file's lock; closing the file gives it back."""
    with path.open("a") as file:
        fcntl.flock(file, kind)
        yield
