"""Programs of a prompt's products follow its rows: those of the numbers that a start rehearses are all there are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.packed_weight import CodeName, Scaling
from gemray_kernels.triton.exact_rows_tiles import MOST_ROWS, ROWS, gated_rows_tile, rows_tile
from gemray_kernels.triton.exact_tiles import gemm_tile, pipeline_beats_gemm, pipeline_tile
from gemray_kernels.triton.linear_tiles import PROMPT_TILE_ROWS
from gemray_kernels.triton.packed_even_choice import EVEN_ROWS, Product, even_tile, gated_even_tile
from gemray_kernels.triton.packed_tile_choice import PROMPT_SPLITS, prompt_tile

FEW = 64
WEIGHTS = {
    "31B": ((16384, 5376), (18432, 5376), (5376, 8192), (5376, 16384), (43008, 5376), (5376, 21504)),
    "26B-A4B": ((8192, 2816), (9216, 2816), (2816, 4096), (2816, 8192), (4224, 2816), (2816, 2112)),
    "E4B": ((4096, 2560), (6144, 2560), (2560, 2048), (2560, 4096), (20480, 2560), (2560, 10240)),
}
"""Outputs and inputs of the layers' products."""


@cache
def exact_tile(num_rows: int, num_out: int, num_in: int, leaves: int) -> object:
    if num_rows <= MOST_ROWS:
        gated = gated_rows_tile(num_rows, num_out, num_in) if leaves == 1 else None
        return rows_tile(num_rows, num_out, num_in // leaves, leaves), gated
    if leaves == 1 and not pipeline_beats_gemm(num_rows, num_out):
        return gemm_tile(num_rows)
    return pipeline_tile(num_rows, num_out, leaves)


@cache
def packed_tile(code: CodeName, num_rows: int, num_out: int, num_in: int) -> object:
    """Parts are counted at run time."""
    product = Product(code, Scaling.CODES if "4" in code else Scaling.ROW, num_out, num_in)
    even, gated = even_tile(product, num_rows), gated_even_tile(product, num_rows)
    if even is not None:
        return replace(even, splits=1), even.splits > 1, gated
    return replace(prompt_tile(code, num_out, num_in, num_rows, most_splits=PROMPT_SPLITS), splits=1)


def rehearsed(step: int) -> list[int]:
    tiled = {*ROWS, *EVEN_ROWS, *range(PROMPT_TILE_ROWS, step, PROMPT_TILE_ROWS), step}
    return [rows for rows in tiled if FEW < rows <= step]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("step", [100, 512, 640, 1000, 2048])
@pytest.mark.parametrize("shape", WEIGHTS)
def test_rehearsed_rows_have_every_tile(shape: str, step: int, tp: int) -> None:
    for num_out, num_in in WEIGHTS[shape]:
        for leaves in (1, 4, 8):
            of = [exact_tile(rows, num_out // tp, num_in, leaves) for rows in range(FEW + 1, step + 1)]
            assert set(of) <= {exact_tile(rows, num_out // tp, num_in, leaves) for rows in rehearsed(step)}
        for code in ("int4", "nvfp4", "int8", "fp8"):
            tiles = {packed_tile(code, rows, num_out // tp, num_in) for rows in range(FEW + 1, step + 1)}
            assert tiles <= {packed_tile(code, rows, num_out // tp, num_in) for rows in rehearsed(step)}
