"""Tiles of few rows of exact products, as they are chosen for the published models: whole subtrees that fit a card."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.numerics import NUM_SHARDS, leaves_of
from gemray_kernels.triton.exact_linear import exact_summands_in_tiles
from gemray_kernels.triton.exact_tiles import FEW_ROWS, streaming_tile
from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches

SHARED = [
    (16384, 5376),
    (18432, 5376),
    (8192, 2816),
    (3072, 2560),
    (2048, 2560),
    (2560, 1536),
    (256, 2560),
    (128, 2816),
]
"""Outputs and inputs of weights whose outputs ranks share."""
SPLIT = [(5376, 8192), (5376, 21504), (2816, 4096), (2816, 2112), (2560, 2048), (2560, 10240), (1536, 6144)]
"""Those of weights whose inputs ranks split."""
PRODUCTS = [
    *((out, inputs, leaves_of(out, inputs)) for out, inputs in SHARED),
    *((out, inputs // ranks, NUM_SHARDS // ranks) for out, inputs in SPLIT for ranks in (1, 2, 8)),
]


@pytest.mark.parametrize("rows", [1, 8, 17, 32, 33, FEW_ROWS])
def test_programs_hold_whole_subtrees_and_all_rows_up_to_a_tile(rows: int) -> None:
    for num_out, num_in, leaves in PRODUCTS:
        tile = streaming_tile(rows, num_out, num_in, leaves, torch.bfloat16)
        assert leaves % tile.leaves == 0, (num_out, num_in, leaves)
        assert tile.rows >= rows


def test_every_program_of_a_gate_s_reader_adds_up_four_parts_at_most() -> None:
    for num_in in (2560, 1536):
        leaves = leaves_of(256, num_in)
        for rows in range(17, FEW_ROWS + 1):  # with fewer they are read as fast
            assert leaves // streaming_tile(rows, 256, num_in, leaves, torch.bfloat16).leaves <= 4


@pytest.mark.parametrize("rows", [16, 32, FEW_ROWS])
def test_tiles_compile_for_hopper(rows: int) -> None:
    tiles = {streaming_tile(rows, *shape, torch.bfloat16) for shape in PRODUCTS}
    x_TI, weight_OI = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in (rows, 4096))
    for tile in sorted(tiles, key=str):
        launch = partial(exact_summands_in_tiles, x_TI, weight_OI, NUM_SHARDS, tile, torch.float32)
        (kernel,) = compile_launches(launch)
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        assert not kernel.stack_bytes, "registers spill"
        assert not kernel.lost_products
