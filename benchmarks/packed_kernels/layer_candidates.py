"""Tiles of few rows that are tried in layers of the smaller models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gemray_kernels.packed_weight import CodeName
from gemray_kernels.triton.ahead_tile import AheadTile
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.packed_experts import PackedExpertTile
from gemray_kernels.triton.packed_linear import PackedTile
from packed_kernels.chosen_tiles import Choice, Product
from packed_kernels.tiles import first

PARTS = (1, 2, 3, 4, 6, 8)
MOST_SHORT_PARTS = 4
"""Parts of fewer inputs than `LONG_INPUTS`."""
LONG_INPUTS = 4000
LEAST_INPUTS = 256
FEWEST, MOST = MULTIPROCESSORS // 4, 5 * MULTIPROCESSORS
"""Programs of 64 outputs that are worth a try."""

FIRST: Mapping[CodeName, Sequence[PackedTile | AheadTile]] = {
    "int4": (first(64, 2, 4), AheadTile(64, 4)),
    "int8": (first(64, 4, 5), AheadTile(64, 4)),
}
"""Tried with every number of parts."""
SUMMANDS: Mapping[CodeName, Sequence[PackedTile | AheadTile]] = {
    "int4": (
        *FIRST["int4"],
        first(64, 4, 4),
        first(64, 2, 6),
        first(32, 2, 4),
        first(32, 1, 6),
        replace(first(64, 2, 4), early=True),
        replace(first(32, 2, 4), early=True),
        AheadTile(64, 6),
        AheadTile(128, 4),
    ),
    "int8": (
        *FIRST["int8"],
        first(64, 2, 5),
        first(32, 2, 5),
        replace(first(64, 4, 5), early=True),
        replace(first(32, 2, 5), early=True),
        AheadTile(64, 6),
        AheadTile(128, 4),
    ),
}
GATED: Mapping[CodeName, Sequence[PackedTile | AheadTile]] = {
    "int4": (
        first(32, 2, 3, units=2),
        first(32, 2, 4),
        first(32, 2, 6),
        first(32, 4, 4),
        first(16, 1, 6),
        first(16, 2, 4),
        first(16, 2, 6),
        first(64, 4, 4),
        PackedTile(16, 2, 6),
        AheadTile(64, 3),
        AheadTile(64, 4),
    ),
    "int8": (
        first(64, 4, 3),
        first(32, 4, 4),
        first(32, 2, 6),
        first(16, 1, 6),
        first(16, 2, 4),
        first(16, 2, 6),
        PackedTile(16, 2, 6),
        AheadTile(64, 3),
    ),
}


def first_candidates(product: Product) -> Iterator[Choice]:
    """Few tiles, with every number of parts."""
    if product.kind == "summands":
        yield from _cut(product, FIRST[product.code])


def candidates(product: Product) -> Iterator[Choice]:
    """All tiles, with every number of parts."""
    if product.kind == "summands":
        yield from _cut(product, SUMMANDS[product.code])
    elif product.kind == "gated":
        for tile in GATED[product.code]:
            yield Choice(tile if isinstance(tile, AheadTile) else replace(tile, early=True))
    else:
        yield from _of_experts()


def _cut(product: Product, tiles: Sequence[PackedTile | AheadTile]) -> Iterator[Choice]:
    for parts in PARTS:
        if parts > MOST_SHORT_PARTS and product.num_in < LONG_INPUTS:
            continue
        programs = -(-product.num_out // 64) * parts
        few = parts > 1 and product.num_in // parts < LEAST_INPUTS
        if few or (parts > 1 and programs > MOST) or (programs < FEWEST and product.num_in // (parts + 1) > 512):
            continue
        for tile in tiles:
            yield Choice(replace(tile, splits=parts))


def _of_experts() -> Iterator[Choice]:
    for outputs, warps, stages in ((32, 4, 4), (64, 4, 4), (32, 2, 6), (16, 2, 6), (64, 4, 6), (128, 4, 4)):
        yield Choice(PackedExpertTile(16, outputs, warps, stages))
