"""The row kernels where there is no GPU: interpreted on the CPU, and compiled for Hopper."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from support.kernels.interpreted import interpreted
from support.kernels.row_parity import cycle_of, random_case
from support.kernels.triton_compile import compile_launches


def test_interpreted_row_kernels_equal_the_references() -> None:
    assert interpreted("row_kernels") == "8 cases\n"


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
