"""Gangs of several cards run one after the other on the same cards, in whichever processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.engine.gpu_lock import cards_to_itself, numbered_cards

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


@pytest.mark.parametrize(
    ("visible", "cards"),
    [(None, None), ("0,1", {0, 1}), (" 10 , 2", {2, 10}), ("", set()), ("0,GPU-ab", None), ("-1", None)],
)
def test_cards_listed_by_number_are_told_apart(visible: str | None, cards: set[int] | None) -> None:
    assert numbered_cards(visible) == cards
