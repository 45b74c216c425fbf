"""Gangs of several cards, and tests that fill a card, run one after the other on it, in whichever processes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.engine.gpu_lock import HeldCards, card_memory
from support.waiting import eventually

TESTS = Path(__file__).parents[2]
# Another process that takes memory of card 1: it says so, and holds it until its input ends.
TAKE_MEMORY = """
import fcntl, sys
from pathlib import Path

from support.engine.gpu_lock import card_memory

patient, to_itself = sys.argv[2] == "patient", sys.argv[3] == "to itself"
at_once = fcntl.flock
if not patient:
    fcntl.flock = lambda file, kind: at_once(file, kind | fcntl.LOCK_NB)
try:
    with card_memory(["1"], to_itself=to_itself, directory=Path(sys.argv[1])):
        print("taken", flush=True)
        sys.stdin.read()
except BlockingIOError:
    sys.exit(3)
"""


# Another process that shares cards, like a test of a gang, and has them alone for a moment. A file tells who is alone.
SHARE_THEN_ALONE = """
import sys, time
from pathlib import Path

from support.engine.gpu_lock import HeldCards

directory = Path(sys.argv[1])
cards = HeldCards(directory)
with cards.held(["0", "1"], to_itself=False):
    (directory / "sharing").open("a").write("x")
    while (directory / "sharing").stat().st_size < 2:
        time.sleep(0.01)
    with cards.alone(2):
        (directory / "alone").mkdir()
        time.sleep(0.2)
        (directory / "alone").rmdir()
print("alone")
"""


def memory_taker(directory: Path, *how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TAKE_MEMORY, str(directory), *how],
        cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def memory_is_free(directory: Path, to_itself: str) -> bool:
    """Whether another process could take memory of card 1 at once."""
    with memory_taker(directory, "at once", to_itself) as taker:
        taker.communicate()
    assert taker.returncode in (0, 3)
    return taker.returncode == 0


def test_tests_share_memory_of_a_card(tmp_path: Path) -> None:
    with card_memory(["0", "1"], to_itself=False, directory=tmp_path):
        assert memory_is_free(tmp_path, "shared")
        assert not memory_is_free(tmp_path, "to itself")
    assert memory_is_free(tmp_path, "to itself")


def test_a_test_has_memory_of_a_card_to_itself(tmp_path: Path) -> None:
    with card_memory(["1"], to_itself=True, directory=tmp_path):
        assert not memory_is_free(tmp_path, "shared")
        assert not memory_is_free(tmp_path, "to itself")
    with card_memory(["0"], to_itself=True, directory=tmp_path):
        assert memory_is_free(tmp_path, "to itself")


async def test_who_waits_for_a_card_is_not_overtaken(tmp_path: Path) -> None:
    with ExitStack() as waiting:
        with card_memory(["1"], to_itself=False, directory=tmp_path):
            waiter = waiting.enter_context(memory_taker(tmp_path, "patient", "to itself"))
            await eventually(lambda: not memory_is_free(tmp_path, "shared"))
        assert waiter.communicate()[0] == "taken\n"
    assert memory_is_free(tmp_path, "to itself")


def test_a_test_has_its_cards_alone_for_a_while(tmp_path: Path) -> None:
    cards = HeldCards(tmp_path)
    with cards.held(["0", "1"], to_itself=False):
        assert memory_is_free(tmp_path, "shared")
        with cards.alone(2):
            assert not memory_is_free(tmp_path, "shared")
        assert memory_is_free(tmp_path, "shared")
        assert not memory_is_free(tmp_path, "to itself")
    assert memory_is_free(tmp_path, "to itself")


def test_who_has_cards_to_itself_keeps_them(tmp_path: Path) -> None:
    cards = HeldCards(tmp_path)
    with cards.held(["1"], to_itself=True):
        with cards.alone(1):
            assert not memory_is_free(tmp_path, "shared")
        assert not memory_is_free(tmp_path, "shared")
    assert memory_is_free(tmp_path, "to itself")


def test_two_that_want_a_shared_card_alone_have_it_in_turn(tmp_path: Path) -> None:
    with ExitStack() as others:
        first, second = (
            others.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", SHARE_THEN_ALONE, str(tmp_path)], cwd=TESTS, stdout=subprocess.PIPE
                )
            )
            for _ in range(2)
        )
        told = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert told == [b"alone\n", b"alone\n"]
    assert first.returncode == second.returncode == 0
    assert memory_is_free(tmp_path, "to itself")


def test_a_gang_over_more_cards_than_its_test_holds_is_refused(tmp_path: Path) -> None:
    cards = HeldCards(tmp_path)
    with cards.held(["0", "1"], to_itself=False):
        with pytest.raises(ValueError, match="3 cards for a test that holds 2"), cards.alone(3):
            pytest.fail("alone on cards of others")
        assert memory_is_free(tmp_path, "shared")


def test_gangs_over_different_cards_run_side_by_side(tmp_path: Path) -> None:
    """A test on card 1 that takes it alone at once goes on beside a gang on others."""
    cards = HeldCards(tmp_path)
    with cards.held(["0", "2"], to_itself=False), cards.alone(2):
        assert memory_is_free(tmp_path, "to itself")
