"""Tiles that are tried for each code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from decode_kernels.weights import Weight
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.packed_linear import PackedTile
from gemray_kernels.triton.packed_prompts import PromptTile
from support.kernels.packed_cases import PackedFormat

FEW_ROWS = 16
STARTS = (False, True)
"""Whether programs start before the kernel before them has ended."""


def first(*values: int, units: int = 1) -> PackedTile:
    """A tile whose left operand is the weight: outputs, warps, stages."""
    return PackedTile(*values, units=units, weight_first=True)


@dataclass(frozen=True)
class Tiles:
    """Tiles that are tried for one code."""

    few: Sequence[PackedTile]
    """For at most `FEW_ROWS` rows, each with the splits that make about two and four programs a multiprocessor."""
    gated: Sequence[PackedTile]
    more: Sequence[PackedTile]
    """For more rows, with the splits of the best for few: the order of sums has to be the same."""
    gated_more: Sequence[PackedTile]


TILES: Mapping[str, Tiles] = {
    "int4": Tiles(
        few=[
            PackedTile(64, 2, 4),
            first(128, 2, 3, units=2),
            first(128, 2, 4),
            first(128, 2, 5),
            first(128, 2, 4, units=2),
            first(128, 4, 4),
            first(64, 2, 4),
            first(64, 2, 6),
            first(64, 1, 4),
            first(64, 1, 4, units=2),
        ],
        gated=[
            PackedTile(32, 2, 3, units=2),
            first(32, 2, 3, units=2),
            first(32, 2, 4),
            first(32, 2, 5),
            first(32, 1, 4),
            first(16, 1, 3, units=2),
            first(16, 1, 4),
            first(16, 1, 5),
            first(16, 1, 3, units=3),
            first(64, 4, 3, units=2),
        ],
        more=[PackedTile(128, 4, 4), PackedTile(64, 2, 4), first(128, 4, 4)],
        gated_more=[PackedTile(64, 4, 4), PackedTile(32, 2, 4), first(32, 4, 4)],
    ),
    "nvfp4": Tiles(
        few=[
            PackedTile(64, 2, 4),
            first(64, 2, 3),
            first(64, 2, 4),
            first(64, 2, 3, units=2),
            first(64, 2, 4, units=2),
            first(64, 4, 4),
            first(32, 2, 4),
            first(128, 4, 4),
        ],
        gated=[
            PackedTile(64, 4, 3),
            first(32, 2, 3),
            first(32, 2, 4),
            first(32, 2, 3, units=2),
            first(32, 2, 4, units=2),
            first(64, 2, 3),
            first(64, 4, 3),
            first(64, 4, 4),
            first(64, 4, 3, units=2),
        ],
        more=[PackedTile(128, 4, 4), PackedTile(64, 2, 4), first(128, 4, 4)],
        gated_more=[PackedTile(64, 4, 3), first(64, 4, 3), first(64, 4, 4)],
    ),
    "fp8": Tiles(
        few=[
            PackedTile(64, 4, 4),
            first(64, 4, 5),
            first(64, 2, 4),
            first(128, 2, 4),
            first(128, 4, 4),
            first(64, 1, 4),
        ],
        gated=[PackedTile(64, 4, 4), first(32, 2, 4), first(32, 2, 5), first(16, 1, 4), first(32, 1, 4)],
        more=[first(128, 4, 4)],
        gated_more=[PackedTile(64, 4, 4)],
    ),
}


def short(tile: PackedTile | PromptTile) -> str:
    """A tile in a table's cell."""
    if isinstance(tile, PromptTile):
        return f"{tile.groups}x{tile.outputs} r{tile.rows} /{tile.splits}"
    held = f"{tile.outputs} w{tile.num_warps} s{tile.num_stages}"
    return f"{'W' if tile.weight_first else 'x'}{held} u{tile.units} {'early ' if tile.early else ''}/{tile.splits}"


def tiles(form: PackedFormat, weight: Weight) -> Iterator[PackedTile]:
    """Tiles to try for few rows, each with some splits."""
    tried = TILES[form.code.name]
    if weight.kind == "gelu":
        yield from (replace(tile, early=early) for tile in tried.gated for early in STARTS)
        return
    for tile in tried.few:
        programs = -(-weight.num_out // tile.outputs)
        for split in sorted({round(count * MULTIPROCESSORS / programs) for count in (2, 3, 4)}):
            if 1 <= split <= 16 and weight.num_in // split >= 512:
                yield from (replace(tile, splits=split, early=early) for early in STARTS)
