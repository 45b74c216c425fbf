"""Tiles of few rows, as they are chosen for the published models: what they cut, and whether they fit a Hopper card."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.triton.linear import MOST_ROWS, Gate, LinearTile, gated_linear_in_tiles, linear_in_tiles
from gemray_kernels.triton.linear_tiles import LEAST_INPUTS, gated_tile, tile_of_summands, whole_tile
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches

WEIGHTS = {
    "31B": [(16384, 5376), (18432, 5376), (5376, 8192), (5376, 16384), (5376, 21504)],
    "26B-A4B": [(8192, 2816), (9216, 2816), (2816, 4096), (2816, 8192), (2816, 2112), (128, 2816)],
    "E4B, inputs of 2,560": [(3072, 2560), (2048, 2560), (6144, 2560), (4096, 2560), (256, 2560)],
    "E4B, outputs of 2,560": [(2560, 2048), (2560, 4096), (2560, 10240)],
    "E2B, inputs of 1,536": [(2560, 1536), (2048, 1536), (5120, 1536), (4096, 1536), (256, 1536)],
    "E2B, outputs of 1,536": [(1536, 2048), (1536, 4096), (1536, 6144), (1536, 12288)],
    "assistants": [(8192, 1024), (16384, 1024), (1024, 8192), (1024, 16384), (1024, 10752), (1024, 4096), (256, 2048)],
    "DFlash": [(5376, 32256), (10240, 5376), (2048, 5376), (5376, 10752), (2816, 16896), (2816, 5632)],
    "head": [(262144, 5376)],
}
"""Outputs and inputs of products whose readers add up parts."""
GATED = [(43008, 5376), (21504, 5376), (4224, 2816), (20480, 2560), (12288, 1536), (24576, 1536), (4096, 256)]
ROWS = (1, 8, 16, 17, 32, 33, 40, MOST_ROWS)
FEW_BYTES = 8
"""What the assembler spills of gated tiles of 16 outputs at 32 rows."""


def of_one_and_two_ranks(model: str) -> list[tuple[int, int]]:
    """Shapes whose outputs two ranks share are halved."""
    return [(out // ranks, num_in) for out, num_in in WEIGHTS[model] for ranks in (1, 2)]


@pytest.mark.parametrize("model", WEIGHTS)
def test_parts_of_the_inputs_are_worth_their_summand(model: str) -> None:
    for num_out, num_in in of_one_and_two_ranks(model):
        tile = tile_of_summands(1, num_out, num_in)
        blocks = num_in // tile.inputs
        assert tile.splits == 1 or blocks // tile.splits * tile.inputs >= LEAST_INPUTS, (num_out, num_in, tile)


def test_only_sums_that_are_added_up_are_cut() -> None:
    assert all(gated_tile(rows, num_out).splits == 1 for num_out, _ in GATED for rows in ROWS)
    whole = [whole_tile(num_out) for model in WEIGHTS for num_out, _ in of_one_and_two_ranks(model)]
    assert all(tile is None or tile.splits == 1 for tile in whole)


@pytest.mark.parametrize("model", WEIGHTS)
def test_where_inputs_are_cut_does_not_follow_the_rows(model: str) -> None:
    for num_out, num_in in of_one_and_two_ranks(model):
        alone = tile_of_summands(1, num_out, num_in)
        for rows in ROWS:
            tile = tile_of_summands(rows, num_out, num_in)
            assert tile.splits == alone.splits, (num_out, num_in, rows)
            assert tile.splits == 1 or tile.inputs == alone.inputs, (num_out, num_in, rows)


@pytest.mark.parametrize("rows", [16, 32, MOST_ROWS])
def test_tiles_compile_for_hopper(rows: int) -> None:
    x_TI = torch.empty(rows, 2048, dtype=torch.bfloat16)
    weight_OI = torch.empty(4096, 2048, dtype=torch.bfloat16)
    tiles: set[LinearTile] = set()
    for shape in (shape for model in WEIGHTS for shape in of_one_and_two_ranks(model)):
        tiles |= {tile for tile in (tile_of_summands(rows, *shape), whole_tile(shape[0])) if tile is not None}
    gated_tiles = {gated_tile(rows, num_out) for num_out, _ in GATED}
    found = [
        kernel
        for tile in sorted({replace(tile, splits=1) for tile in tiles}, key=str)
        for kernel in compile_launches(partial(linear_in_tiles, x_TI, weight_OI, tile, out_dtype=torch.bfloat16))
    ]
    for tile in sorted(gated_tiles, key=str):
        found += compile_launches(partial(gated_linear_in_tiles, x_TI, weight_OI, tile, Gate.GELU))
    assert len(found) >= 2
    for kernel in found:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        assert (kernel.stack_bytes or 0) <= FEW_BYTES, "registers spill"
        assert "wgmma" in kernel.ptx or "mma.sync" in kernel.ptx
