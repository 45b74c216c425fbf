"""A log line is never glued to the bar of a start."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from gemray_cluster.cli.log_lines import PresentStderr
from gemray_cluster.cli.progress import start_progress
from gemray_cluster.gang.launcher import StartProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_stands_apart_from_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(PresentStderr()))
    with start_progress() as show:
        show(StartProgress("load", done=1, total=2))
        logger.warning("the line of the log")
        show(StartProgress("load", done=2, total=2))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    lines = [line.strip() for line in re.split(r"[\r\n]", shown)]
    assert "the line of the log" in lines
    assert any("loading weights" in line for line in lines)
