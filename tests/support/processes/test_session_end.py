"""Nothing outlives a test session, whether it ends or is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.processes import session_end
from support.waiting import HANG_S, eventually

LEAVES_A_PROCESS = """
import subprocess, sys, time
import pytest

@pytest.mark.parametrize("seconds", [{seconds}])
def test_that_leaves_a_process(seconds):
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    left = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    print("left", left.pid, flush=True)
    time.sleep(seconds)
"""


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("is_killed", [False, True])
async def test_what_a_test_leaves_ends_with_the_session(tmp_path: Path, is_killed: bool) -> None:
    (tmp_path / "test_leaving.py").write_text(LEAVES_A_PROCESS.format(seconds=1000 if is_killed else 0))
    plugins = ["-p", "support.processes.session_end", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", "-s", *plugins, "test_leaving.py"],
        cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[2])}, stdout=subprocess.PIPE, text=True,
    ) as session:  # fmt: skip
        assert session.stdout is not None
        line = next(line for line in session.stdout if "left " in line)
        try:
            left = psutil.Process(int(line.split("left ")[1].split()[0]))
        except psutil.NoSuchProcess:
            assert not is_killed
            return
        if is_killed:
            assert is_alive(left)
            session.kill()
        session.stdout.read()
    assert session.wait(HANG_S) == (-9 if is_killed else 0)
    await eventually(lambda: not is_alive(left))


@pytest.mark.parametrize("leaves", [True, False])
def test_what_began_between_two_looks_counts(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    looks = iter([[], [7]] if leaves else [[], []])
    monkeypatch.setattr(session_end, "marked", lambda _: next(looks))
    assert session_end.is_any_left("mark") is leaves
    assert next(looks, None) is None, "both looks were taken"
