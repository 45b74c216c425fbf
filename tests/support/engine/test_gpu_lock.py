"""Gangs of several cards run one after the other, in whichever processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.engine.gpu_lock import LOCK_NAME, cards_to_itself

TRY = """
import fcntl, sys
with open(sys.argv[1], "a") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(3)
"""


def code_of_another(directory: Path) -> int:
    """0 where another process gets the lock at once, 3 where it would wait."""
    return subprocess.run([sys.executable, "-c", TRY, str(directory / LOCK_NAME)], check=False).returncode


def test_another_process_waits_while_a_gang_has_the_cards(tmp_path: Path) -> None:
    with cards_to_itself(tmp_path):
        assert code_of_another(tmp_path) == 3
    assert code_of_another(tmp_path) == 0


def test_a_gang_that_fails_lets_go(tmp_path: Path) -> None:
    try:
        with cards_to_itself(tmp_path):
            raise LookupError
    except LookupError:
        assert code_of_another(tmp_path) == 0
