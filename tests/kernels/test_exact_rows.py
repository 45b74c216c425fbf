"""Tiles of 65 to 256 rows where there is no GPU: which are chosen, that they are refused, and compiled for Hopper."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_kernels.numerics import NUM_SHARDS, leaves_of
from gemray_kernels.triton import exact_rows
from gemray_kernels.triton.exact_rows import RowsTile, gated_rows, summands_of_rows
from gemray_kernels.triton.exact_rows_tiles import MOST_ROWS, gated_rows_tile, rows_tile
from gemray_kernels.triton.linear import Gate
from support.kernels.triton_compile import MAX_SHARED_BYTES, Compiled, compile_launches

SHAPES = {
    "31B qkv": (16384, 5376, 1),
    "31B o": (5376, 8192, NUM_SHARDS),
    "31B down": (5376, 21504, NUM_SHARDS),
    "31B gate_up": (43008, 5376, 1),
    "26B-A4B down": (2816, 2112, NUM_SHARDS),
    "26B-A4B router": (128, 2816, leaves_of(128, 2816)),
    "E4B qkv": (3072, 2560, 1),
    "E4B o": (2560, 2048, NUM_SHARDS),
    "E4B down, a rank of 8": (2560, 1280, 1),
}
"""Outputs, inputs and leaves."""
FEW_SPILLS = 96
"""Bytes of a thread that some assemblers spill where sums are stored, beside the loop."""


@pytest.mark.parametrize(
    ("width", "parts"),
    [(16, (16, 0)), (48, (32, 16)), (80, (64, 16)), (160, (128, 32)), (192, (128, 64)), (256, (256, 0))],
)
def test_a_width_is_two_powers_of_two(width: int, parts: tuple[int, int]) -> None:
    assert RowsTile(2, width, 4).parts == parts


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ((0, 64, 4, 1), "groups 0: 1 to 3 are allowed"),
        ((4, 64, 4, 1), "groups 4: 1 to 3 are allowed"),
        ((2, 8, 4, 1), "width 8: 16 to 256, one or two powers of two from 16 on, are allowed"),
        ((2, 136, 4, 1), "width 136: 16 to 256"),
        ((2, 112, 4, 1), "width 112: 16 to 256"),
        ((2, 288, 4, 1), "width 288: 16 to 256"),
        ((2, 64, 4, 3), "3 leaves: 1, 2, 4 or 8 are allowed"),
    ],
)
def test_other_tiles_are_refused(fields: tuple[int, int, int, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RowsTile(*fields)


@pytest.mark.parametrize("name", SHAPES)
def test_chosen_tiles_hold_all_rows_of_whole_subtrees(name: str) -> None:
    num_out, num_in, leaves = SHAPES[name]
    tiles = {rows: rows_tile(rows, num_out, num_in // leaves, leaves) for rows in range(65, MOST_ROWS + 1)}
    assert len({*tiles.values()}) <= 6, "prompts of any length compile as many programs"
    for rows, tile in tiles.items():
        assert leaves % tile.leaves == 0
        assert tile.num_stages >= 3, "too few tiles are on their way"
        # A group's rows that are not there are multiplied for nothing.
        padded = -(-rows // tile.width) * tile.width
        assert padded <= max(1.5 * rows, rows + 63), (rows, tile)


@pytest.mark.parametrize("rows", [80, 160])
@pytest.mark.parametrize("name", ["31B qkv", "31B o", "26B-A4B router", "E4B o"])
def test_chosen_tiles_compile_for_hopper(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_rows, "starts_early", lambda _: True)
    num_out, num_in, leaves = SHAPES[name]
    tile = rows_tile(rows, num_out, num_in // leaves, leaves)
    x, weight = (torch.empty(n, num_in, dtype=torch.bfloat16) for n in (rows, num_out))
    dtype = torch.bfloat16 if tile.leaves == leaves else torch.float32
    (kernel,) = compile_launches(lambda: summands_of_rows(x, weight, leaves, tile, dtype))
    check(kernel)


@pytest.mark.parametrize("rows", [80, 256])
@pytest.mark.parametrize("name", ["31B gate_up", "E4B qkv"])
def test_gated_tiles_compile_for_hopper(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_rows, "starts_early", lambda _: True)
    num_out, num_in, _ = SHAPES[name]
    tile = gated_rows_tile(rows, num_out, num_in)
    x, weight = (torch.empty(n, num_in, dtype=torch.bfloat16) for n in (rows, num_out))
    (kernel,) = compile_launches(lambda: gated_rows(x, weight, 1, tile, Gate.GELU))
    check(kernel)


def check(kernel: Compiled) -> None:
    """Whether everything fits, and nothing is fetched before rows may be read."""
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert (kernel.stack_bytes or 0) <= FEW_SPILLS, "sums spill"
    assert not kernel.lost_products
    first_fetch, wait = kernel.ptx.index("cp.async.bulk.tensor"), kernel.ptx.index("griddepcontrol.wait")
    assert wait < first_fetch
    assert "wgmma.mma_async" in kernel.ptx
