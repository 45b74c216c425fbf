"""The Triton twin of keyed_gumbel, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.waiting import HANG_S

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

COMPARE = """
import torch
from gemray_kernels.reference import keyed_noise
from gemray_kernels.triton import keyed_noise as triton_keyed_noise

seeds = torch.tensor([0, -1, 2**62 + 12345, -(2**63)])
positions = torch.tensor([0, 7, 2**32 - 1, 2**33 + 5])
for ids in (torch.arange(3000), torch.tensor([262143, 5, 6, 5]), torch.arange(40).view(4, 10), torch.arange(0)):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        expected = keyed_noise.keyed_gumbel(seeds, positions, ids, dtype)
        found = triton_keyed_noise.keyed_gumbel(seeds, positions, ids, dtype)
        assert found.dtype is dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
"""


def test_the_interpreted_kernel_equals_the_reference() -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert result.returncode == 0, result.stderr
