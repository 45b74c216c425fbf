"""A layer's products at the few rows of a decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from torch import Tensor

from decode_kernels.measure import median_us, random
from decode_kernels.weights import Weight
from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.triton.layer_norms import add_then_norms
from gemray_kernels.triton.packed_linear import PackedTile
from packed_kernels.programs import Job, product
from packed_kernels.tiles import FEW_ROWS, STARTS, TILES, short, tiles
from packed_kernels.timing import copies, times
from support.kernels.packed_cases import PackedFormat

ROWS = (1, 8, 16, 32, 64)


@dataclass
class Case:
    """A weight of the layer in one format, and what its tiles took at one row."""

    form: PackedFormat
    weight: Weight
    sets: list[TiledWeight]
    num_bytes: int
    found: dict[PackedTile, float]

    def best(self, count: int) -> list[PackedTile]:
        """The fastest tiles."""
        return sorted(self.found, key=lambda tile: self.found[tile])[:count]

    def tiles_of(self, rows: int) -> list[PackedTile]:
        """Tiles for so many rows."""
        best = self.best(3)
        if rows <= FEW_ROWS:
            return best
        tried = TILES[self.form.code.name]
        more = tried.gated_more if self.weight.kind == "gelu" else tried.more
        return [replace(tile, splits=best[0].splits) for tile in more] + best[:1]

    def jobs(self) -> list[Job]:
        """Programs that `more` and `layer` need."""
        kind, name = self.weight.kind, self.form.name
        best = self.best(1)[0]
        return [Job(name, kind, tile, rows) for rows in ROWS[2:] for tile in self.tiles_of(rows)] + [
            Job(name, kind, replace(best, early=early), 8) for early in STARTS
        ]

    def more(self, rate: float) -> dict[str, object]:
        """Times at all rows."""
        floor = self.num_bytes / rate * 1e6
        print(f"\n{self.form.name} {self.weight.name}: floor {floor:.1f} us", flush=True)
        rows_of: dict[int, dict[str, float]] = {}
        for rows in ROWS:
            x = random(rows, self.weight.num_in)
            rows_of[rows] = {short(tile): times(self.weight, x, self.sets, tile) for tile in self.tiles_of(rows)}
            cells = ", ".join(f"{name} {us:.1f} ({floor / us:.2f})" for name, us in rows_of[rows].items())
            print(f"  {rows} rows: {cells}", flush=True)
        return {
            "format": self.form.name,
            "weight": asdict(self.weight),
            "bytes": self.num_bytes,
            "rate": rate,
            "at 1 row": {short(tile): us for tile, us in self.found.items()},
            "rows": rows_of,
        }


def sweep(form: PackedFormat, weight: Weight, rate: float) -> Case:
    """Times of all tiles at one row."""
    sets, num_bytes = copies(form, weight)
    x = random(1, weight.num_in)
    found = {tile: times(weight, x, sets, tile) for tile in tiles(form, weight)}
    case = Case(form, weight, sets, num_bytes, found)
    print(f"\n{form.name} {weight.name}: {num_bytes / 1e6:.1f} MB, floor {num_bytes / rate * 1e6:.1f} us; at 1 row:")
    print("  " + ", ".join(f"{short(tile)} {found[tile]:.1f}" for tile in case.best(99)), flush=True)
    return case


def layer(cases: Sequence[Case], rate: float) -> dict[str, object]:
    """Microseconds of a layer's four products with the norms between them, by how much is asked for ahead."""
    floor = sum(case.num_bytes for case in cases) / rate * 1e6
    qkv, o, gate_up, down = cases
    result: dict[str, float] = {}
    for rows in (1, 8):
        width = qkv.weight.num_in
        norm = Norm(random(width), 1e-6)
        residual = random(rows, width)
        heads = random(rows, o.weight.num_in)

        def one(
            number: int, early: bool, residual: Tensor = residual, heads: Tensor = heads, norm: Norm = norm
        ) -> None:
            def of(case: Case, x: Tensor) -> Tensor:
                tile = replace(case.best(1)[0], early=early)
                return product(case.weight, x, case.sets[number % len(case.sets)], tile)

            def normed(summands: Tensor) -> Tensor:
                return add_then_norms(residual, summands, norm, None, [norm])[1]

            of(qkv, residual)
            hidden = normed(of(o, heads))
            normed(of(down, of(gate_up, hidden)))

        for early in STARTS:
            name = f"{rows} rows, {'early' if early else 'late'}"
            result[name] = median_us([partial(one, number, early) for number in range(6)])
    cells = ", ".join(f"{name}: {us:.1f}" for name, us in result.items())
    print(f"\n{cases[0].form.name} layer, floor {floor:.1f} us: {cells}", flush=True)
    return {"format": cases[0].form.name, "layer us": result, "floor us": floor}
