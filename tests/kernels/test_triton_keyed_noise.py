"""The Triton twin of keyed_gumbel, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest

from support.kernels.interpreted import interpreted

pytest.importorskip("triton", reason="triton is to be had on Linux alone")


def test_the_interpreted_kernel_equals_the_reference() -> None:
    interpreted("keyed_noise")
