"""Whole cycles with the Triton kernels of rows and of what lies between products, interpreted, give the same ids."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import HANG_S

pytest.importorskip("triton", reason="triton is to be had on Linux alone")


@pytest.mark.slow
def test_cycles_in_triton_give_the_references_ids() -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("interpret_cycles.py")
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["31B mtp equal", "31B dflash equal", "26B-A4B none equal", "E4B none equal"]
