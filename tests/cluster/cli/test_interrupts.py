"""Ctrl-C while a command is still being imported: no traceback, and the status that interrupts have."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gemray.cli.run import Commands, run
from support.waiting import HANG_S


def interrupted() -> Commands:
    raise KeyboardInterrupt


def test_an_interrupt_while_commands_are_imported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(interrupted)
    assert (ended.value.code, capsys.readouterr()) == (130, ("", ""))


@pytest.mark.parametrize("module", ["gemray_cluster.cli", "gemray.cli.main"])
def test_what_is_imported_before_is_light(module: str) -> None:
    """An interrupt there is a traceback, so that it must take no time."""
    script = (
        f"import sys, {module}; print([name for name in ('typer', 'grpc', 'torch', 'psutil') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "[]\n"
