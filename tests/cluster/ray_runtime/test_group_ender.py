"""What ends process groups when their owner has died: at once, and not before."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from gemray_cluster.ray_runtime.group_ender import GroupEnder
from support.waiting import HANG_S, eventually

OWNER = """
import sys
from gemray_cluster.ray_runtime.group_ender import GroupEnder

ender = GroupEnder(map(int, sys.argv[1:]))
print(ender._shell.pid, flush=True)
for order in sys.stdin:
    ender.let_go()
    print("let go", flush=True)
"""


@pytest.fixture
def groups() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that lead groups and outlive who has started them."""
    leaders = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2)]
    yield leaders
    for leader in leaders:
        leader.kill()
        leader.wait()


def owner_of(groups: list[subprocess.Popen[bytes]]) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A process that has them end with it, and the shell that waits for its end."""
    command = [sys.executable, "-c", OWNER, *(str(leader.pid) for leader in groups)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, psutil.Process(int(owner.stdout.readline()))


def test_groups_end_with_a_killed_owner(groups: list[subprocess.Popen[bytes]]) -> None:
    owner, shell = owner_of(groups)
    assert [leader.poll() for leader in groups] == [None, None]
    assert shell.is_running()
    owner.kill()
    owner.communicate()
    assert [leader.wait(HANG_S) for leader in groups] == [-signal.SIGKILL] * 2


async def test_groups_that_were_let_go_live_on(groups: list[subprocess.Popen[bytes]]) -> None:
    owner, shell = owner_of(groups)
    out, _ = owner.communicate("go\n", timeout=HANG_S)
    assert (owner.returncode, out) == (0, "let go\n")
    await eventually(lambda: not shell.is_running())
    assert [leader.poll() for leader in groups] == [None, None]


def test_letting_go_twice(groups: list[subprocess.Popen[bytes]]) -> None:
    ender = GroupEnder([leader.pid for leader in groups])
    ender.let_go()
    ender.let_go()
    assert [leader.poll() for leader in groups] == [None, None]
