"""Tiles of 65 to 256 rows on CUDA: whatever the tile, the bits are those of tiles that stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemray_kernels.numerics import NUM_SHARDS, tree_sum
from gemray_kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.triton.exact_linear import ExactTile, exact_summands_in_tiles
from gemray_kernels.triton.exact_rows import RowsTile, gated_rows, summands_of_rows
from gemray_kernels.triton.linear import Gate
from support.kernels.kernel_parity import poisoned_memory

pytestmark = pytest.mark.gpu

SHAPES = {
    "31B o": (5376, 8192, NUM_SHARDS),
    "leaves that no step divides, and outputs that no tile does": (2808, 2112, NUM_SHARDS),
    "few outputs": (72, 2560, NUM_SHARDS),
    "tiles enough for every program to take several": (43008, 2560, NUM_SHARDS),
}
"""Outputs, inputs and leaves."""
TILES = (
    RowsTile(1, 48, 8),
    RowsTile(1, 80, 8, leaves=8),
    RowsTile(2, 160, 6),
    RowsTile(2, 128, 7, leaves=4),
    RowsTile(2, 256, 4),
    RowsTile(3, 160, 5),
    RowsTile(3, 80, 6, leaves=4),
)
ROWS = (65, 80, 129, 160, 250)


def label(tile: RowsTile) -> str:
    """A tile's name among tests."""
    return f"{tile.groups}g{tile.width}x{tile.leaves}"


def inputs_of(name: str, rows: int) -> tuple[Tensor, Tensor, int]:
    """Rows of many magnitudes, the weight, and its leaves."""
    num_out, num_in, leaves = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(num_out + num_in)
    x = torch.randn(rows, num_in, generator=generator, device="cuda")
    x *= torch.randn(rows, num_in, generator=generator, device="cuda").exp()
    weight = torch.randn(num_out, num_in, generator=generator, device="cuda") * num_in**-0.5
    return x.bfloat16(), weight.bfloat16(), leaves


def streamed(x: Tensor, weight: Tensor, leaves: int) -> Tensor:
    """Sums that tiles of at most 64 rows and one leaf compute."""
    tile = ExactTile(64, 64, 64, num_warps=4, num_stages=3)
    return tree_sum(exact_summands_in_tiles(x, weight, leaves, tile, torch.float32))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tile", TILES, ids=label)
def test_every_tile_has_the_bits_of_tiles_that_stream(tile: RowsTile, name: str) -> None:
    x, weight, leaves = inputs_of(name, max(ROWS))
    expected = streamed(x, weight, leaves)
    with poisoned_memory():
        for rows in ROWS:
            found = summands_of_rows(x[:rows], weight, leaves, tile, torch.float32)
            assert len(found) == leaves // tile.leaves
            assert torch.equal(tree_sum(found), expected[:rows]), rows


@pytest.mark.parametrize("gate", [Gate.GELU, Gate.SILU])
@pytest.mark.parametrize("tile", [RowsTile(1, 80, 8), RowsTile(2, 160, 6), RowsTile(3, 128, 5)], ids=label)
def test_gates_round_as_separate_kernels(tile: RowsTile, gate: Gate) -> None:
    for name in ("tiles enough for every program to take several", "few outputs"):
        x, weight, _ = inputs_of(name, max(ROWS))
        act = gelu_tanh_and_mul if gate is Gate.GELU else silu_and_mul
        expected = act(streamed(x, weight, 1).bfloat16())
        with poisoned_memory():
            for rows in ROWS:
                assert torch.equal(gated_rows(x[:rows], weight, 1, tile, gate), expected[:rows]), (name, rows)


def test_calls_one_behind_the_other_do_not_mix() -> None:
    """A kernel that starts early reads rows that the one before it writes."""
    x, weight, leaves = inputs_of("31B o", 160)
    square = weight[:, :5376].contiguous()
    tile = RowsTile(2, 160, 6)
    expected = streamed(x, weight, leaves).bfloat16()
    for _ in range(3):
        expected = streamed(expected, square, 1).bfloat16()
    for _ in range(20):
        found = tree_sum(summands_of_rows(x, weight, leaves, tile, torch.float32)).bfloat16()
        for _ in range(3):
            found = summands_of_rows(found, square, 1, tile, torch.bfloat16)[0]
        assert torch.equal(found, expected)
