"""Tiles of packed products that are exchanged under a model that has been built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from torch import Tensor

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.packed_weight import CodeName
from gemray_kernels.triton import packed_experts, packed_products
from gemray_kernels.triton.ahead_tile import AheadTile
from gemray_kernels.triton.packed_experts import PackedExpertTile
from gemray_kernels.triton.packed_linear import PackedTile
from packed_kernels.tiles import short

FEW_ROWS = 16


@dataclass(frozen=True)
class Product:
    """A product of a layer: those of the same shape are one."""

    kind: str
    """summands, gated, experts or gated experts."""
    code: CodeName
    num_out: int
    """Without those that are left out; of a gated one gate and up rows."""
    num_in: int

    def __str__(self) -> str:
        return f"{self.kind} {self.num_out} x {self.num_in}"


@dataclass(frozen=True)
class Choice:
    """The tile of a product of few rows."""

    tile: PackedTile | AheadTile | PackedExpertTile

    @property
    def splits(self) -> int:
        """Parts of the inputs."""
        return 1 if isinstance(self.tile, PackedExpertTile) else self.tile.splits

    def __str__(self) -> str:
        if isinstance(self.tile, PackedTile):
            return short(self.tile)
        if isinstance(self.tile, AheadTile):
            return f"A{self.tile.outputs} s{self.tile.num_stages} /{self.tile.splits}"
        tile = self.tile
        return f"x{tile.outputs} w{tile.num_warps} s{tile.num_stages}"


Tiles = dict[Product, Choice]


@contextmanager
def chosen_tiles(tiles: Mapping[Product, Choice], seen: dict[Product, None] | None = None) -> Iterator[None]:
    """Have these products take these tiles with at most 16 rows, and with more of them the same parts.

    Args:
        tiles: the others' are those that are served.
        seen: is told of every product.
    """
    parts_of, ahead_of = packed_products.tile_of_summands, packed_products.ahead_tile
    gated_of, gated_ahead_of = packed_products.gated_tile, packed_products.gated_ahead_tile
    columns_of, gated_columns_of = packed_products.columns_tile, packed_products.gated_columns_tile
    expert_of = packed_experts.packed_expert_linear

    def choice(kind: str, weight: TiledWeight, num_out: int) -> Choice | None:
        product = Product(kind, weight.code, num_out, weight.num_in)
        if seen is not None:
            seen[product] = None
        return tiles.get(product)

    def tile_of_summands(weight: TiledWeight, num_out: int, num_rows: int) -> PackedTile:
        chosen, served = choice("summands", weight, num_out), parts_of(weight, num_out, num_rows)
        if chosen is None:
            return served
        if isinstance(chosen.tile, PackedTile) and num_rows <= FEW_ROWS:
            return chosen.tile
        return replace(served, splits=chosen.splits)

    def ahead_tile(weight: TiledWeight, num_out: int, num_rows: int) -> AheadTile | None:
        chosen = choice("summands", weight, num_out)
        if chosen is None:
            return ahead_of(weight, num_out, num_rows)
        return chosen.tile if isinstance(chosen.tile, AheadTile) and num_rows <= 8 else None

    # A single row is served in columns, unless a tile of another kernel was chosen.
    def columns_tile(weight: TiledWeight, num_out: int, num_rows: int) -> AheadTile | None:
        return columns_of(weight, num_out, num_rows) if choice("summands", weight, num_out) is None else None

    def gated_columns_tile(weight: TiledWeight, num_rows: int) -> AheadTile | None:
        return gated_columns_of(weight, num_rows) if choice("gated", weight, weight.num_out) is None else None

    def gated_tile(weight: TiledWeight, num_rows: int) -> PackedTile:
        chosen = choice("gated", weight, weight.num_out)
        if chosen is None or not isinstance(chosen.tile, PackedTile) or num_rows > FEW_ROWS:
            return gated_of(weight, num_rows)
        return chosen.tile

    def gated_ahead_tile(weight: TiledWeight, num_rows: int) -> AheadTile | None:
        chosen = choice("gated", weight, weight.num_out)
        if chosen is None:
            return gated_ahead_of(weight, num_rows)
        return chosen.tile if isinstance(chosen.tile, AheadTile) and num_rows <= 8 else None

    def expert_linear(
        x_XI: Tensor,
        weight: TiledWeight,
        experts_TK: Tensor,
        pairs_a_row: int,
        *,
        gated: bool,
        pairs: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        chosen = choice("gated experts" if gated else "experts", weight, weight.num_out)
        tile = None
        if chosen is not None and isinstance(chosen.tile, PackedExpertTile) and len(experts_TK) <= FEW_ROWS:
            tile = chosen.tile
        return expert_of(x_XI, weight, experts_TK, pairs_a_row, gated=gated, pairs=pairs, tile=tile)

    with ExitStack() as stack:
        for name, function in (
            ("tile_of_summands", tile_of_summands),
            ("ahead_tile", ahead_tile),
            ("columns_tile", columns_tile),
            ("gated_columns_tile", gated_columns_tile),
            ("gated_tile", gated_tile),
            ("gated_ahead_tile", gated_ahead_tile),
        ):
            stack.enter_context(mock.patch.object(packed_products, name, function))
        stack.enter_context(mock.patch.object(packed_experts, "packed_expert_linear", expert_linear))
        yield


def served_products(run: Callable[[int], object]) -> list[Product]:
    """The products of a pass of one row, those of most outputs first."""
    seen: dict[Product, None] = {}
    with chosen_tiles({}, seen):
        run(1)
    return sorted(seen, key=lambda product: -product.num_out * product.num_in)
