"""The row kernels where there is no GPU: interpreted on the CPU, and compiled for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from support.kernels.row_parity import cycle_of, random_case
from support.kernels.triton_compile import compile_launches
from support.waiting import HANG_S


def test_interpreted_row_kernels_equal_the_references() -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("interpret_row_kernels.py")
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "8 cases\n"


def test_row_kernels_compile_for_hopper() -> None:
    from gemray_kernels.table import triton_row_kernels

    kernels = triton_row_kernels()
    case = next(case for case in (random_case(seed, "cpu") for seed in range(50)) if case.num_drafting)
    found = compile_launches(lambda: cycle_of(kernels, case))
    assert [kernel.name for kernel in found] == [
        "_cut_kernel",
        "_query_kernel",
        "_write_drafts_kernel",
        "_pack_kernel",
        "_pack_kernel",
        "_cut_to_outputs_kernel",
        "_pack_kernel",
        "_output_places_kernel",
        "_settle_kernel",
        "_places_kernel",
        "_keep_kernel",
        "_advance_kernel",
        "_settle_kernel",
    ]
    assert all(not kernel.stack_bytes for kernel in found), "registers spill"
