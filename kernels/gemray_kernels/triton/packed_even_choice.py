"""Tiles of products of 65 to 160 rows with packed weights (`packed_even`), by sweeps over 31B's weights on an H200
(`benchmarks/results/2026-11-30-h200-rows-in-one-tile`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from gemray_kernels.packed_weight import CodeName, Scaling
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.packed_even import EvenTile

STEP_INPUTS = 128
MOST_SPLITS = 4
"""Most parts that a reader adds up."""
PART_BYTES_A_US = 2e6
"""Speed at which a product's parts are written and read."""


@dataclass(frozen=True)
class _Tiles:
    """Tiles of so many rows."""

    fewest_rows: int
    gated: EvenTile
    """Tile of a product whose results are gated and have more tiles than there are multiprocessors."""
    others: tuple[tuple[float, EvenTile], ...]
    """Tiles of another one, and the microseconds that a step takes."""


_TILES: Mapping[int, _Tiles] = {
    80: _Tiles(
        fewest_rows=65,
        gated=EvenTile(128, 2, rows=64, more=16, shares=True),
        others=((0.80, EvenTile(64, 2, rows=64, more=16)), (0.94, EvenTile(64, 3, rows=64, more=16))),
    ),
    160: _Tiles(
        fewest_rows=129,
        gated=EvenTile(64, 3, rows=128, more=32, shares=True),
        others=((0.97, EvenTile(64, 2, rows=128, more=32)), (1.26, EvenTile(64, 3, rows=128, more=32))),
    ),
}
"""By most rows. With 81 to 128 of them the tiles of `packed_prompts` are as fast."""
EVEN_ROWS = tuple(_TILES)


@dataclass(frozen=True)
class Product:
    """What the tile of a product follows from, beside its rows."""

    code: CodeName
    scaling: Scaling
    num_out: int
    num_in: int


def even_tile(product: Product, num_rows: int, *, most_splits: int = MOST_SPLITS) -> EvenTile | None:
    """Choose a tile in place of `packed_tile_choice.prompt_tile`; None where that one's is taken.

    Args:
        product: whose tile it is.
        num_rows: more than 64.
        most_splits: parts that its reader may add up.
    """
    most = _most_rows(product, num_rows)
    return None if most is None else _soonest(product.num_out, product.num_in, most, min(most_splits, MOST_SPLITS))


def gated_even_tile(product: Product, num_rows: int) -> EvenTile | None:
    """Likewise for a product with gate and up rows, whose results are gated."""
    most = _most_rows(product, num_rows)
    if most is None:
        return None
    tile = _TILES[most].gated
    return tile if product.num_out >= tile.groups * tile.outputs * MULTIPROCESSORS else None


def _most_rows(product: Product, num_rows: int) -> int | None:
    """Four bits alone were timed."""
    if product.code != "int4" or product.scaling != Scaling.CODES:
        return None
    return next((most for most, tiles in _TILES.items() if tiles.fewest_rows <= num_rows <= most), None)


@lru_cache(maxsize=4096)
def _soonest(num_out: int, num_in: int, most_rows: int, most_splits: int) -> EvenTile:
    """The tile with which all multiprocessors are done soonest, as each computes one after the other."""
    steps = -(-num_in // STEP_INPUTS)

    def time(timed: tuple[float, EvenTile]) -> float:
        step_us, tile = timed
        rounds = -(-(-(-num_out // (tile.groups * tile.outputs)) * tile.splits) // MULTIPROCESSORS)
        part_bytes = 4 * most_rows * num_out * tile.splits if tile.splits > 1 else 0
        return rounds * -(-steps // tile.splits) * step_us + part_bytes / PART_BYTES_A_US

    cuts = range(1, most_splits + 1)
    return min(((us, replace(tile, splits=n)) for us, tile in _TILES[most_rows].others for n in cuts), key=time)[1]
