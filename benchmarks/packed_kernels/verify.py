"""Times products of verify rows with packed weights by the kernel of few rows and by their own.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python -m packed_kernels.verify --out results.json

Medians of replays of a CUDA graph over copies that exceed the cache together, for the layers of 31B: each product
alone, and a layer's four with the norms that lie there, by which of them take the newer kernel. Bits are compared
first; programs are compiled in several processes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor

from decode_kernels.measure import median_us, random
from decode_kernels.weights import WEIGHTS, Weight
from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.triton.layer_norms import add_then_norms
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_linear import packed_gated_linear_in_tiles, packed_linear_in_tiles
from gemray_kernels.triton.packed_tile_choice import gated_tile, tile_of_summands
from gemray_kernels.triton.packed_verify import VerifyTile, packed_verify_gated_linear, packed_verify_linear
from packed_kernels.timing import copies
from support.kernels.packed_cases import FORMATS

LAYER = ("qkv sliding", "o sliding", "gate_up", "down")
ROWS = (24, 32, 40, 48, 64)
LAYERS = 6
"""One after the other in a graph, with other copies of the weights."""


@dataclass(frozen=True)
class Product:
    """A layer's product, over several copies of its weight."""

    weight: Weight
    sets: Sequence[TiledWeight]

    def few(self, x: Tensor, number: int = 0) -> Tensor:
        """By the kernel of few rows."""
        packed = self.sets[number % len(self.sets)]
        if self.weight.kind == "gelu":
            return packed_gated_linear_in_tiles(x, packed, gated_tile(packed, len(x)), Gate.GELU)
        tile = tile_of_summands(packed, packed.num_out, len(x))
        dtype = x.dtype if tile.splits == 1 else torch.float32
        return packed_linear_in_tiles(x, packed, tile, out_dtype=dtype)

    def verify(self, x: Tensor, number: int = 0) -> Tensor:
        """By the kernel of verify rows, with the same parts."""
        packed = self.sets[number % len(self.sets)]
        rows = triton.next_power_of_2(len(x))
        if self.weight.kind == "gelu":
            return packed_verify_gated_linear(x, packed, VerifyTile(3, rows), Gate.GELU)
        splits = tile_of_summands(packed, packed.num_out, len(x)).splits
        dtype = x.dtype if splits == 1 else torch.float32
        return packed_verify_linear(x, packed, VerifyTile(4, rows, splits), out_dtype=dtype)


def compare(job: tuple[str, Weight]) -> str | None:
    """Compile a product's programs; say where their bits differ."""
    name, weight = job
    product = Product(weight, copies(FORMATS[name], weight)[0])
    differing = []
    for rows in (ROWS[0], ROWS[-1] - 1):
        x = random(rows, weight.num_in)
        wanted = product.few(x)
        if not all(torch.equal(product.verify(x), wanted) for _ in range(3)):
            differing.append(rows)
    return f"{name} {weight.name}: other bits with {differing} rows" if differing else None


def layer_us(products: Sequence[Product], rows: int, taken: Sequence[str]) -> float:
    """Microseconds of a layer whose products of these names are by the kernel of verify rows."""
    qkv, o, gate_up, down = products
    residual, heads = random(rows, qkv.weight.num_in), random(rows, o.weight.num_in)
    norm = Norm(random(qkv.weight.num_in), 1e-6)

    def of(product: Product, x: Tensor, number: int) -> Tensor:
        return (product.verify if product.weight.name in taken else product.few)(x, number)

    def one(number: int) -> None:
        hidden = add_then_norms(residual, of(o, heads, number), norm, None, [norm])[1]
        hidden = add_then_norms(residual, of(down, of(gate_up, hidden, number), number), norm, None, [norm])[1]
        of(qkv, hidden, number)

    return median_us([partial(one, number) for number in range(LAYERS)])


def measure(name: str, weights: Sequence[Weight]) -> dict[str, dict[str, float]]:
    """Microseconds by rows and what was timed."""
    products = [Product(weight, copies(FORMATS[name], weight)[0]) for weight in weights]
    found: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        row: dict[str, float] = {}
        for product in products:
            x = random(rows, product.weight.num_in)
            for kernel in (product.few, product.verify):
                calls = [partial(kernel, x, number) for number in range(len(product.sets))]
                row[f"{product.weight.name} {kernel.__name__}"] = median_us(calls)
        for taken in ((), ("gate_up",), ("gate_up", "qkv sliding", "down"), LAYER, ()):
            row[f"layer, {', '.join(taken) or 'none'}"] = layer_us(products, rows, taken)
        found[str(rows)] = row
        print(f"{name}, {rows} rows: " + ", ".join(f"{what} {us:.1f}" for what, us in row.items()), flush=True)
    return found


def main() -> None:
    """Measure every format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int4 group 32,nvfp4,fp8 channel")
    parser.add_argument("--out", type=Path, help="a file for all numbers")
    arguments = parser.parse_args()
    started = time.monotonic()
    names = arguments.formats.split(",")
    weights = [next(w for w in WEIGHTS if (w.model, w.name) == ("31B", name)) for name in LAYER]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        for differs in pool.map(compare, [(name, weight) for name in names for weight in weights]):
            print(differs or "the same bits", flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    results = {}
    for name in names:
        results[name] = measure(name, weights)
        print(f"-- {name}: {time.monotonic() - started:.0f} s", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
