"""Ranks end with their coordinator, whatever they do at that moment."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gemray_cluster.gang.lifeline import Lifeline
from gemray_workers.errors import CommunicationError
from gemray_workers.rank.lifeline import hold_lifeline

HANG_S = 120.0
"""Only a rank that does not end takes that long."""

COORDINATOR = """
import time
from gemray_cluster.gang.lifeline import Lifeline
lifeline = Lifeline("127.0.0.1", 1)
print(lifeline.port, flush=True)
time.sleep(1000)
"""
RANK = """
import ctypes, os, signal, sys, threading, time
from gemray_workers.rank.lifeline import hold_lifeline
held = hold_lifeline("127.0.0.1", int(sys.argv[1]))
print("held", flush=True)
"""
BUSY = {
    "waiting": "threading.Event().wait()",
    "holding the interpreter's lock": "ctypes.PyDLL(None).sleep(1000)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    running = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def first_line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


@pytest.mark.parametrize("busy", BUSY.values(), ids=BUSY.keys())
def test_a_rank_ends_when_its_coordinator_is_killed(busy: str) -> None:
    with process(COORDINATOR) as coordinator, process(RANK + busy, first_line(coordinator)) as rank:
        assert first_line(rank) == "held"
        assert rank.poll() is None
        coordinator.kill()
        assert rank.wait(HANG_S) == -signal.SIGKILL


def test_a_rank_ends_when_its_gang_is_ended() -> None:
    lifeline = Lifeline("127.0.0.1", 1)
    with process(RANK + BUSY["waiting"], str(lifeline.port)) as rank:
        assert first_line(rank) == "held"
        lifeline.close()
        lifeline.close()
        assert rank.wait(HANG_S) == -signal.SIGKILL


def test_a_coordinator_out_of_reach_is_named() -> None:
    lifeline = Lifeline("127.0.0.1", 1)
    lifeline.close()
    with pytest.raises(CommunicationError, match=f"cannot be reached at 127.0.0.1:{lifeline.port}"):
        hold_lifeline("127.0.0.1", lifeline.port)
