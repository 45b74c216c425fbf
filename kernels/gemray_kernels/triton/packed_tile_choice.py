"""Tiles of products with packed weights.

What decides the bits of a row, the splits and the order within them, depends on the weight alone, up to 64 rows; a
single row of four bits has tiles of its own, and other bits (`packed_columns_choice`). How many outputs a program has,
and which operand the weight is, follows the rows: eight rows are enough for a right one.
The rules are those of sweeps over 31B's weights on an H200 (`benchmarks/packed_kernels`), and of its layers, whose
products are faster when they start late (`benchmarks/results/2026-11-29-h200-late-products`), but for gated ones, and
let the kernel behind them start early (`benchmarks/results/2026-11-30-h200-starts`); NVFP4's are those of
`benchmarks/results/2026-11-30-h200-nvfp4`. With up to eight rows, weights of some products come ahead
(`gemray_kernels.triton.packed_ahead`). Where the programs of such a product are two for each multiprocessor or fewer,
registers leave room for two: they start one by one as multiprocessors fall idle, and some would take three or four of
them, others none (`benchmarks/results/2026-11-30-h200-placement`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import triton

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.packed_weight import CodeName, Scaling
from gemray_kernels.triton.ahead_tile import ROOM_FOR_TWO, AheadTile
from gemray_kernels.triton.linear import MOST_ROWS
from gemray_kernels.triton.linear_tiles import MOST_SPLITS, MULTIPROCESSORS
from gemray_kernels.triton.packed_ahead import ROWS, serves
from gemray_kernels.triton.packed_linear import PackedTile
from gemray_kernels.triton.packed_prompts import PromptTile
from gemray_kernels.triton.packed_verify import TILE_O, VerifyTile

LEAST_INPUTS = 512
"""Fewer inputs a program are not worth their summand."""
FEW_ROWS = 16
"""More rows are read too often by programs of few outputs."""
MANY_OUTPUTS = 128 * MULTIPROCESSORS
"""From so many gated outputs on, tiles of 64 are two a multiprocessor."""
PROMPT_SPLITS = 3
"""Most parts of a prompt's product that a reader adds up."""
PART_INPUTS = 1300
"""Inputs whose products take as long as a further part takes to be written and read."""
MOST_PART_ROWS = 512
"""Parts of more rows do not stay in the cache."""
PROMPT_TILES = (
    PromptTile(outputs=128, groups=2, rows=128),
    PromptTile(outputs=64, groups=3, rows=128),
    PromptTile(outputs=64, groups=2, rows=256),
    PromptTile(outputs=64, groups=2, rows=128),
)
_PROMPT_COSTS: Mapping[CodeName, tuple[int, ...]] = {
    "int4": (60, 44, 58, 35),
    "nvfp4": (71, 48, 58, 37),
    "int8": (59, 44, 58, 34),
    "fp8": (59, 44, 58, 34),
}
"""Microseconds that each tile takes with 5,376 inputs (`benchmarks/results/2026-11-29-h200-prompt-rings`). Those
of int8 are taken for fp8's, of whose last one there is only what `2026-11-29-h200-prompts` has. NVFP4, which takes most
to decode, wants more rows a number."""

LEAST_LONG_INPUTS = 3000
"""Inputs of a part that outlasts the ends of the programs before it: 31B's down projection has 3,584 in four bits."""

NARROW_OUTPUTS = 2048
LEAST_NARROW_INPUTS = 1000
"""Inputs of a part of a product of few outputs, if its programs are to be one a multiprocessor."""

LEAST_EVEN_INPUTS = 2600
"""Inputs of a part of 31B's qkv and of its full layers' o projection, or a few less."""
LEAST_VERIFY_INPUTS = 2000
"""Parts of fewer inputs end before the kernel of verify rows is faster."""
LEAST_AT_WORK = 0.8
"""Share of the multiprocessors that its programs keep at work, where it is chosen."""


@dataclass(frozen=True)
class _VerifyRows:
    """Rows with which the kernel of verify rows is faster (`benchmarks/results/2026-11-30-h200-verify-rows`)."""

    gated: range
    """Rows of a gated product: three groups, of a gate's and an up tile each."""
    summands: range
    """Rows of another one: four groups of a tile each."""


_FOUR_BITS = _VerifyRows(gated=range(17, MOST_ROWS + 1), summands=range(17, 33))
_VERIFY_ROWS: Mapping[CodeName, _VerifyRows] = {
    "int4": _FOUR_BITS,
    "nvfp4": _FOUR_BITS,
    "int8": _VerifyRows(gated=range(33, MOST_ROWS + 1), summands=range(0)),
    "fp8": _VerifyRows(gated=range(33, MOST_ROWS + 1), summands=range(0)),
}
"""Those of int8, which was not timed, are fp8's."""


@dataclass(frozen=True)
class _Ahead:
    """Products whose weights come ahead: those of 31B that are faster so
    (`benchmarks/results/2026-11-30-h200-packed-clocks`)."""

    short: AheadTile
    """Tile of parts of at most `short_inputs`, as its o projection has behind attention."""
    short_inputs: int
    narrow: AheadTile | None = None
    """Tile of products of at most `NARROW_OUTPUTS`, of which one program is on each multiprocessor: E2B's down
    projection (`benchmarks/results/2026-11-30-h200-small-packed`)."""
    long: AheadTile | None = None
    """Tile of parts of `LEAST_LONG_INPUTS` and more: registers leave room for four programs on a multiprocessor, so
    that all have as many."""
    gated: AheadTile | None = None
    even: AheadTile | None = None
    """Tile of parts of `LEAST_EVEN_INPUTS` and more, where all programs are there at once, two on a multiprocessor."""
    least_spread: int = 0
    """Inputs of a part, at least, for which programs are kept to two a multiprocessor: shorter ones end sooner where
    they may lie closer."""

    def of_parts(self, inputs: float) -> AheadTile | None:
        """The tile of parts of so many inputs."""
        if inputs <= self.short_inputs:
            return self.short
        if inputs >= LEAST_LONG_INPUTS:
            return self.long
        return self.even if inputs >= LEAST_EVEN_INPUTS else None


_FOUR_BITS_AHEAD = _Ahead(
    short=AheadTile(outputs=128, num_stages=4),
    short_inputs=1400,
    long=AheadTile(outputs=64, num_stages=3),
    gated=AheadTile(outputs=64, num_stages=3),
    even=AheadTile(outputs=128, num_stages=4),
    least_spread=750,
)
_EIGHT_BITS_AHEAD = _Ahead(short=AheadTile(outputs=64, num_stages=4), short_inputs=2800, least_spread=2000)
_AHEAD: Mapping[CodeName, _Ahead] = {
    "int4": replace(_FOUR_BITS_AHEAD, narrow=AheadTile(outputs=64, num_stages=4)),
    "nvfp4": _FOUR_BITS_AHEAD,
    "int8": _EIGHT_BITS_AHEAD,
    "fp8": _EIGHT_BITS_AHEAD,
}
"""Those of int8, which was not timed, are fp8's."""


@dataclass(frozen=True)
class _Tiles:
    few: PackedTile
    """Tile of a product of few rows whose outputs are not gated."""
    programs: int
    """About how many of them there should be, by splits."""
    more: PackedTile
    """Tile of up to 64 rows."""
    gated: tuple[tuple[int, PackedTile], ...]
    """Most rows of a gated product, and its tile."""
    few_rows: int = FEW_ROWS
    """Most rows that take `few`."""
    narrow: PackedTile | None = None
    """Tile of a gated product of few rows and of fewer than `MANY_OUTPUTS` outputs, where it has its own."""


_EIGHT_BITS = _Tiles(
    few=PackedTile(64, 4, 5, weight_first=True),
    programs=2 * MULTIPROCESSORS,
    more=PackedTile(64, 4, 5, weight_first=True),
    gated=((MOST_ROWS, PackedTile(64, 4, 3, weight_first=True)),),
)
_TILES: Mapping[CodeName, _Tiles] = {
    "int4": _Tiles(
        few=PackedTile(64, 2, 4, weight_first=True),
        programs=4 * MULTIPROCESSORS,
        more=PackedTile(128, 4, 4),
        gated=(
            (32, PackedTile(64, 4, 4, weight_first=True)),
            (MOST_ROWS, PackedTile(64, 4, 3, weight_first=True)),
        ),
        narrow=PackedTile(32, 2, 3, units=2, weight_first=True),
    ),
    "nvfp4": _Tiles(
        few=PackedTile(64, 2, 4, weight_first=True),
        programs=4 * MULTIPROCESSORS,
        more=PackedTile(128, 4, 4),
        gated=(
            (8, PackedTile(32, 2, 4, weight_first=True)),
            (FEW_ROWS, PackedTile(64, 4, 3)),
            (MOST_ROWS, PackedTile(64, 4, 3, weight_first=True)),
        ),
    ),
    "int8": _EIGHT_BITS,
    "fp8": _EIGHT_BITS,
}


def whole_tile(weight: TiledWeight) -> PackedTile:
    """Choose a tile for a product whose inputs are not split."""
    return PackedTile(outputs=64, num_warps=4, num_stages=5)


def tile_of_summands(weight: TiledWeight, num_out: int, num_rows: int) -> PackedTile:
    """Choose a tile for a product of so many outputs, of at most 64 rows, whose reader adds up its parts."""
    tiles = _TILES[weight.code]
    programs = -(-num_out // tiles.few.outputs)
    inputs = weight.words_BOC.shape[0] * weight.unit.inputs
    narrow = _narrow_tile(weight, num_out)
    if narrow is not None:
        splits = narrow.splits
    else:
        splits = max(1, min(round(tiles.programs / programs), inputs // LEAST_INPUTS, MOST_SPLITS))
    # Splits end where steps do: those of all rows are the same.
    tile = tiles.few if num_rows <= tiles.few_rows else replace(tiles.more, units=tiles.few.units)
    return replace(tile, splits=splits)


def gated_tile(weight: TiledWeight, num_rows: int) -> PackedTile:
    """Choose a tile for a product of at most 64 rows with gate and up rows, whose result is gated."""
    tiles = _TILES[weight.code]
    tile = next(tile for most, tile in tiles.gated if num_rows <= most)
    width = weight.num_out // 2
    if tiles.narrow is not None and num_rows <= FEW_ROWS and width < MANY_OUTPUTS:
        tile = tiles.narrow
    if width < 64 * MULTIPROCESSORS and tile.outputs > 32:
        tile = PackedTile(outputs=32, num_warps=4, num_stages=4)
    return replace(tile, early=True)


def verify_tile(weight: TiledWeight, num_out: int, num_rows: int) -> VerifyTile | None:
    """Choose a tile for the kernel of verify rows, in place of `tile_of_summands` and with its parts; None where that
    one's is faster, or would have other bits."""
    splits = tile_of_summands(weight, num_out, num_rows).splits
    if num_rows not in _VERIFY_ROWS[weight.code].summands or weight.num_in < LEAST_VERIFY_INPUTS * splits:
        return None
    return _if_at_work(VerifyTile(4, triton.next_power_of_2(num_rows), splits), weight, num_out)


def gated_verify_tile(weight: TiledWeight, num_rows: int) -> VerifyTile | None:
    """Likewise in place of `gated_tile`."""
    if num_rows not in _VERIFY_ROWS[weight.code].gated:
        return None
    return _if_at_work(VerifyTile(3, triton.next_power_of_2(num_rows)), weight, weight.num_out // 2)


def ahead_tile(weight: TiledWeight, num_out: int, num_rows: int) -> AheadTile | None:
    """Choose a tile for the kernel that asks for weights ahead, in place of `tile_of_summands` and with its parts; None
    where that one's is faster."""
    if num_rows > ROWS.value or not serves(weight):
        return None
    tiles = _AHEAD[weight.code]
    splits = tile_of_summands(weight, num_out, num_rows).splits
    inputs = weight.num_in / splits
    narrow = _narrow_tile(weight, num_out)
    tile = narrow or tiles.of_parts(inputs)
    if tile is None:
        return None
    programs = -(-num_out // tile.outputs) * splits
    are_two = programs <= 2 * MULTIPROCESSORS
    are_too_few = narrow is None and programs < 2 * LEAST_AT_WORK * MULTIPROCESSORS
    if are_too_few or (tile is tiles.even and not are_two):
        return None
    room = ROOM_FOR_TWO if are_two and inputs >= tiles.least_spread else tile.most_registers
    return replace(tile, splits=splits, most_registers=room)


def gated_ahead_tile(weight: TiledWeight, num_rows: int) -> AheadTile | None:
    """Likewise in place of `gated_tile`."""
    comes = num_rows <= ROWS.value and weight.num_out // 2 >= MANY_OUTPUTS and serves(weight)
    return _AHEAD[weight.code].gated if comes else None


def _narrow_tile(weight: TiledWeight, num_out: int) -> AheadTile | None:
    """The tile of a product of few outputs, as `ahead_tile` has it for few rows; its parts are those of all."""
    tiles = _AHEAD[weight.code]
    if tiles.narrow is None or num_out > NARROW_OUTPUTS or not serves(weight):
        return None
    splits = round(MULTIPROCESSORS / -(-num_out // tiles.narrow.outputs))
    fits_parts = LEAST_NARROW_INPUTS * splits <= weight.num_in <= tiles.short_inputs * splits
    return replace(tiles.narrow, splits=splits) if fits_parts else None


def _if_at_work(tile: VerifyTile, weight: TiledWeight, num_out: int) -> VerifyTile | None:
    programs = -(-num_out // (TILE_O * tile.groups)) * tile.splits
    rounds = -(-programs // MULTIPROCESSORS)
    has_scales = weight.scaling in (Scaling.ROW, Scaling.CODES)
    return tile if has_scales and programs >= LEAST_AT_WORK * rounds * MULTIPROCESSORS else None


@lru_cache(maxsize=4096)
def prompt_tile(code: CodeName, num_out: int, num_in: int, num_rows: int, *, most_splits: int = 1) -> PromptTile:
    """Choose a tile for more than 64 rows: with which all multiprocessors are done soonest, as each computes one tile
    after the other.

    Args:
        code: of the weight's numbers.
        num_out: outputs.
        num_in: inputs.
        num_rows: more than 64.
        most_splits: parts that its reader may add up.
    """

    def time(tile: PromptTile) -> float:
        tiles = -(-num_out // (tile.groups * tile.outputs)) * -(-num_rows // tile.rows) * tile.splits
        inputs = num_in / tile.splits * -(-tiles // MULTIPROCESSORS)
        cost = _PROMPT_COSTS[code][PROMPT_TILES.index(replace(tile, splits=1))]
        return cost * inputs * (1 + PART_INPUTS / num_in * (tile.splits - 1))

    parts = range(1, 1 + (most_splits if num_rows <= MOST_PART_ROWS else 1))
    return min((replace(tile, splits=n) for tile in PROMPT_TILES for n in parts), key=time)
