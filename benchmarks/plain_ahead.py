"""Times layers of whole models whose plain weights are asked for before the rows are there (`linear_ahead`).

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python -m plain_ahead --out results.json \
        [--models E2B-it,31B-it] [--rows 1,8,8x5] [--tiles]

A model is cut to a layer of each kind, as `packed_kernels.layer_tiles` cuts it, and its passes are captured as graphs.
`served` is what is served; `norms wait`: no norm lets the product behind it start at once; `late`: no product asks for
its weight ahead. All must give the same bits with up to 64 rows: the run ends with 1 where they do not. With `--tiles`
every product is tried without and with other tiles, one at a time: what all layers together take more or less. Times
are the least of a few medians of replays, in microseconds of all layers, all columns in turn. Programs are compiled in
several processes first.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton

from gemray_kernels.triton import layer_norms, linear_choice, linear_tiles
from gemray_kernels.triton.ahead_tile import AheadTile
from gemray_kernels.triton.linear import MOST_ROWS, Gate
from gemray_kernels.triton.linear_ahead import step_bytes
from gemray_kernels.triton.linear_tiles import MOST_STAGES, REGISTERS, RING_BYTES
from gemray_workers.execution.programs_ahead import compile_side_by_side, noted_programs
from packed_kernels.layer_tiles import FEW_EXPERTS, PROCESSES, Model

MODELS = "E2B-it,E4B-it,26B-A4B-it,31B-it"
TURNS = 4


class Step(NamedTuple):
    """Rows of a pass."""

    sequences: int
    rows: int = 1
    """Rows of each."""

    @property
    def num_rows(self) -> int:
        """All of them."""
        return self.sequences * self.rows


@dataclass(frozen=True)
class Product:
    """A product of a layer: those of the same shape are one."""

    gated: bool
    num_out: int
    num_in: int

    def __str__(self) -> str:
        return f"{'gated' if self.gated else 'summands'} {self.num_out} x {self.num_in}"

    def served(self, rows: int) -> AheadTile | None:
        """The tile that is served."""
        choose = linear_tiles.gated_ahead_tile if self.gated else linear_tiles.ahead_tile
        return choose(rows, self.num_out, self.num_in)

    def tiles(self, rows: int) -> Iterator[AheadTile | None]:
        """None, and tiles of which one, two or three lie beside each other."""
        yield None
        splits = 1 if self.gated else linear_tiles.tile_of_summands(rows, self.num_out, self.num_in).splits
        steps = max(2, -(-self.num_in // 128 // splits))
        for outputs in (32, 64) if self.gated else (64, 128):
            for beside, registers in REGISTERS.items():
                room = RING_BYTES // beside // step_bytes(outputs, rows, Gate.GELU if self.gated else Gate.NONE)
                if min(room, steps) >= 2:
                    yield AheadTile(outputs, min(MOST_STAGES, room, steps), splits, registers)


Tiles = Mapping[Product, AheadTile | None]


@contextmanager
def chosen(tiles: Tiles, seen: dict[Product, None] | None = None) -> Iterator[None]:
    """Have these products take these tiles; `seen` is told of every product."""

    def choose(gated: bool, rows: int, num_out: int, num_in: int) -> AheadTile | None:
        product = Product(gated, num_out, num_in)
        if seen is not None:
            seen[product] = None
        return tiles[product] if product in tiles else product.served(rows)

    with (
        mock.patch.object(linear_choice, "ahead_tile", lambda *shape: choose(False, *shape)),
        mock.patch.object(linear_choice, "gated_ahead_tile", lambda *shape: choose(True, *shape)),
    ):
        yield


@contextmanager
def norms_wait() -> Iterator[None]:
    """Let no norm start what is behind it at once."""
    launch = layer_norms._launch

    def late(*arguments: Any, lets_at_once: bool) -> tuple[torch.Tensor, ...]:
        return launch(*arguments, lets_at_once=False)

    with mock.patch.object(layer_norms, "_launch", late):
        yield


@contextmanager
def late() -> Iterator[None]:
    """Let no product ask for its weight ahead."""
    with ExitStack() as stack:
        stack.enter_context(norms_wait())
        stack.enter_context(mock.patch.object(linear_choice, "on_hopper", return_value=False))
        yield


VARIANTS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "served": nullcontext,
    "norms wait": norms_wait,
    "late": late,
}


def products_of(model: Model) -> list[Product]:
    """Those of a pass, of most numbers first."""
    seen: dict[Product, None] = {}
    with chosen({}, seen):
        model.hidden(1)
    return sorted(seen, key=lambda product: -product.num_out * product.num_in)


def run_all(model: Model, steps: Sequence[Step], *, tiles: bool) -> None:
    """Launch everything once."""
    products = products_of(model) if tiles else []
    for step in steps:
        for variant in VARIANTS.values():
            with variant():
                model.hidden(*step)
        for product in products:
            for tile in product.tiles(step.num_rows):
                with chosen({product: tile}):
                    model.hidden(*step)


def compile_share(number: int, names: Sequence[str], steps: Sequence[Step], tiles: bool) -> None:
    """Compile one process's share of all programs, so that they lie in the cache on disk."""
    with noted_programs() as programs:
        for name in names:
            run_all(Model(name, FEW_EXPERTS), steps, tiles=tiles)
    for failure in compile_side_by_side(programs[number::PROCESSES], 1).failures:
        print("refused", failure[:200], flush=True)


def times(model: Model, step: Step) -> tuple[dict[str, float], list[str]]:
    """Microseconds by variant, and variants whose bits differ though all rows are few."""
    found: dict[str, float] = {}
    with late():
        expected = model.hidden(*step).clone()
    differ = []
    for _ in range(TURNS):
        for name, variant in VARIANTS.items():
            with variant():
                found[name] = min(found.get(name, float("inf")), model.us(*step))
                if step.num_rows <= MOST_ROWS and not torch.equal(model.hidden(*step), expected):
                    differ.append(name)
    return found, sorted(set(differ))


def sweep(model: Model, step: Step, served: float) -> dict[str, dict[str, float]]:
    """What all layers take more or less with another tile of one product."""
    found: dict[str, dict[str, float]] = {}
    for product in products_of(model):
        changes = found[str(product)] = {}
        for tile in product.tiles(step.num_rows):
            if tile == product.served(step.num_rows):
                continue
            with chosen({product: tile}):
                changes[short(tile)] = min(model.us(*step) for _ in range(2)) - served
        cells = (f"{tile} {us:+.1f}" for tile, us in sorted(changes.items(), key=lambda item: item[1])[:4])
        print(f"  {product}, {short(product.served(step.num_rows))}: {', '.join(cells)}", flush=True)
    return found


def short(tile: AheadTile | None) -> str:
    """A tile in few letters."""
    return "none" if tile is None else f"{tile.outputs} s{tile.num_stages} /{tile.splits} r{tile.most_registers}"


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--rows", default="1,8,16,32", help="sequences of one row each, or of several: 8x5")
    parser.add_argument("--tiles", action="store_true", help="try other tiles of every product")
    parser.add_argument("--out", type=Path, help="a file for all numbers")
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    steps = [Step(*map(int, step.split("x"))) for step in arguments.rows.split(",")]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.starmap(compile_share, [(i, names, steps, arguments.tiles) for i in range(PROCESSES)], chunksize=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    results, faults = [], 0
    for name in names:
        model = Model(name)
        gc.collect()
        gc.freeze()  # a capture collects
        for step in steps:
            found, differ = times(model, step)
            faults += len(differ)
            head = f"{name}, {model.num_layers} layers, {step.sequences} x {step.rows} rows: "
            print(head + told(found, differ), flush=True)
            result: dict[str, object] = {"model": name, "rows": step, "us": found, "differ": differ}
            if arguments.tiles:
                result["tiles"] = sweep(model, step, found["served"])
            results.append(result)
        del model
        torch.cuda.empty_cache()
        if arguments.out:
            arguments.out.write_text(json.dumps(results))
    sys.exit(1 if faults else 0)


def told(found: Mapping[str, float], differ: Sequence[str]) -> str:
    """A line of results."""
    line = ", ".join(f"{name} {us:.1f}" for name, us in found.items())
    return line + (f"; OTHER BITS: {', '.join(differ)}" if differ else "")


if __name__ == "__main__":
    main()
