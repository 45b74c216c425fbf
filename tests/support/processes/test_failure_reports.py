"""Failures are told even if tracebacks are logged by what is collected meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.waiting import HANG_S

FAILING = '''
import asyncio, gc, pytest

tasks = []

@pytest.fixture(autouse=True)
def until_it_is_told():
    yield
    gc.set_threshold(700, 10, 10)
    tasks.clear()

async def fail():
    return 5 + (1 / (3 - 3))

class Garbage:
    """With each collection a task goes whose error nobody has read."""

    def __init__(self):
        self.me = self

    def __del__(self):
        if tasks:
            tasks.pop()
            Garbage()

def test_that_fails():
    async def main():
        tasks.extend(asyncio.ensure_future(fail()) for _ in range(300))
        await asyncio.wait(tasks)
    asyncio.new_event_loop().run_until_complete(main())
    Garbage()
    gc.set_threshold(100, 1, 1)
    assert [1, 2, (3 + 4) * 5] == {"a": [i for i in range(3)]}
'''


def test_a_failure_is_told_while_tasks_are_collected(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    plugins = ["-p", "support.processes.failure_reports", "-p", "no:cacheprovider"]
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", *plugins, "test_failing.py"],
        cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[2])}, capture_output=True, text=True,
        timeout=HANG_S, check=False,
    )  # fmt: skip
    assert "1 failed" in told.stdout, told.stdout + told.stderr
    assert "AssertionError: assert [1, 2, 35] ==" in told.stdout
