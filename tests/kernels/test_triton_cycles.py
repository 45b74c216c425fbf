"""Whole cycles with the Triton kernels of rows and of what lies between products, interpreted, give the same ids."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from support.kernels.interpreted import interpreted


@pytest.mark.slow
def test_cycles_in_triton_give_the_references_ids() -> None:
    assert interpreted("cycles").splitlines() == [
        "31B mtp equal",
        "31B dflash equal",
        "26B-A4B none equal",
        "E4B none equal",
    ]
