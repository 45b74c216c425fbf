"""Gangs of several cards, and tests that fill a card, run one after the other on it, in whichever processes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.engine.gpu_lock import HeldCards, card_memory, cards_to_itself, numbered_cards
from support.waiting import eventually

TESTS = Path(__file__).parents[2]
# Another process that wants the cards; what would wait there fails.
TRY = """
import fcntl, sys
from pathlib import Path

from support.engine.gpu_lock import cards_to_itself

at_once = fcntl.flock
fcntl.flock = lambda file, kind: at_once(file, kind | fcntl.LOCK_NB)
visible = {"CUDA_VISIBLE_DEVICES": sys.argv[2]} if len(sys.argv) > 2 else {}
try:
    with cards_to_itself(Path(sys.argv[1]), visible):
        pass
except BlockingIOError:
    sys.exit(3)
"""

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
    with cards.alone():
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


def another_would_wait(directory: Path, visible: str | None) -> bool:
    """Whether another process that sees these cards would have to wait."""
    arguments = [str(directory), *([] if visible is None else [visible])]
    code = subprocess.run([sys.executable, "-c", TRY, *arguments], cwd=TESTS, check=False).returncode
    assert code in (0, 3)
    return code == 3


def seeing(visible: str | None) -> dict[str, str]:
    return {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}


@pytest.mark.parametrize(
    ("held", "wanted"),
    [(None, None), ("0,1", "0,1"), ("0,1", "3, 1"), ("0,1", None), (None, "0,1"), ("0,1", "GPU-ab"), ("MIG-cd", "1")],
)
def test_another_process_waits_while_a_gang_has_one_of_its_cards(
    tmp_path: Path, held: str | None, wanted: str | None
) -> None:
    with cards_to_itself(tmp_path, seeing(held)):
        assert another_would_wait(tmp_path, wanted)
    assert not another_would_wait(tmp_path, wanted)


def test_gangs_over_different_cards_run_side_by_side(tmp_path: Path) -> None:
    with cards_to_itself(tmp_path, seeing("0,1")):
        assert not another_would_wait(tmp_path, "2,3")


def test_a_gang_that_fails_lets_go(tmp_path: Path) -> None:
    try:
        with cards_to_itself(tmp_path, seeing("0,1")):
            raise LookupError
    except LookupError:
        assert not another_would_wait(tmp_path, "0,1")


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
        with cards.alone():
            assert not memory_is_free(tmp_path, "shared")
        assert memory_is_free(tmp_path, "shared")
        assert not memory_is_free(tmp_path, "to itself")
    assert memory_is_free(tmp_path, "to itself")


def test_who_has_cards_to_itself_keeps_them(tmp_path: Path) -> None:
    cards = HeldCards(tmp_path)
    with cards.held(["1"], to_itself=True):
        with cards.alone():
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


@pytest.mark.parametrize(
    ("visible", "cards"),
    [(None, None), ("0,1", {0, 1}), (" 10 , 2", {2, 10}), ("", set()), ("0,GPU-ab", None), ("-1", None)],
)
def test_cards_listed_by_number_are_told_apart(visible: str | None, cards: set[int] | None) -> None:
    assert numbered_cards(visible) == cards
