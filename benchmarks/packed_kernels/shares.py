"""Times layers of 31B whose gate and up resident programs share evenly (`shares_kernel`), beside layers as served.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests timeout 120 python -m packed_kernels.shares \
        [--out results.json] [--formats int4,nvfp4]

Medians of replays of CUDA graphs over layers whose weights exceed the cache together, all columns in turn, with one row
and with eight; then gate and up alone. Every column but the first one says how much more or less it takes, in
microseconds; `served again` is the first one's kernels. *Floor* is how long reading codes and scales takes at the rate
of a sum in the same run. Programs are compiled in several processes first. Layers must have the bits of those that are
served, and products must leave no sums to the ones behind them: the run ends with 1 where they don't. A program that
waits for sums that never come would wait for ever, hence `timeout`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor
from typing_extensions import override

from decode_kernels.measure import DEVICE, Report, poisoned, random
from gemray_kernels.packed_product import PackedProduct
from gemray_kernels.packed_tiles import TiledWeight, laid_out
from gemray_kernels.triton.packed_products import TiledProduct
from layer_kernels import KINDS, PACKED, Batch, Layer, Variant
from packed_kernels.shares_kernel import SharesTile, no_sums_yet, packed_gelu_in_shares
from packed_kernels.timing import read_rate
from support.kernels.packed_cases import FORMATS, random_packed

KIND = KINDS[0]
BATCHES = ((1, 1), (8, 1))
TILES = {
    str(tile): tile
    for tile in (
        SharesTile(64, 4, 5, programs=264, most_registers=88),
        SharesTile(64, 4, 7, programs=264, most_registers=72),
        SharesTile(64, 8, 7, programs=264, most_registers=64),
        SharesTile(128, 8, 6, programs=132, most_registers=88),
        SharesTile(32, 4, 6, programs=528, most_registers=56),
    )
}
"""Two programs on each of 132 multiprocessors, one, or four."""
SERVED, AGAIN = "served", "served again"
COLUMNS = (SERVED, *TILES, AGAIN)
NUM_LAYERS = 4
ROUNDS = 11
CHECKS = 3
"""Runs of a layer whose bits are compared: a product may not leave sums to the next one."""
SETTLING_S = 0.3
"""Memory that captures give back is cleared meanwhile, beside which reading is slower."""
PROCESSES = 12
SMALL_INPUTS = 256
"""Inputs of weights on which tiles are compiled."""


@dataclass(frozen=True)
class SharedLayer(Layer):
    """A layer as served, but for gate and up, which are a column's."""

    products: Mapping[str, PackedProduct]
    are_there: Mapping[str, Tensor]
    """Flags of a tile's programs, by its name."""

    @classmethod
    def like(cls, layer: Layer) -> SharedLayer:
        """A layer of the same numbers."""
        products = {name: TiledProduct(w) for name, w in layer.weights.items() if isinstance(w, TiledWeight)}
        are_there = {name: no_sums_yet(tile, DEVICE) for name, tile in TILES.items()}
        return cls(layer.kind, layer.weights, layer.k_pages, layer.v_pages, products, are_there)

    def read_bytes(self, names: Collection[str]) -> int:
        """Bytes of these weights' codes and scales."""
        weights = [self.weights[name] for name in names]
        return sum(w.words_BOC.nbytes + w.scale_BO.nbytes for w in weights if isinstance(w, TiledWeight))

    @override
    def copy(self) -> SharedLayer:
        return SharedLayer.like(super().copy())

    @override
    def summands(self, name: str, x_TI: Tensor, variant: Variant) -> Tensor:
        return self.products[name].summands(x_TI)

    @override
    def gelu(self, x_TI: Tensor, variant: Variant) -> Tensor:
        tile, weight = TILES.get(variant.name), self.weights["gate_up"]
        if tile is None or not isinstance(weight, TiledWeight):
            return self.products["gate_up"].gelu(x_TI)
        return packed_gelu_in_shares(x_TI, weight, tile, self.are_there[variant.name])


def compile_programs(form: str, name: str) -> None:
    """Run a tile once over a small weight, or layers as served."""
    if name in TILES:
        packed = random_packed(FORMATS[PACKED[form]], 2 * KIND.width, SMALL_INPUTS, device="cuda")
        assert packed.tiling is not None
        weight, tile = laid_out(packed, packed.tiling), TILES[name]
        packed_gelu_in_shares(random(1, SMALL_INPUTS), weight, tile, no_sums_yet(tile, DEVICE))
    else:
        for batch in (Batch(KIND, *shape) for shape in BATCHES):
            batch.run(SharedLayer.like(Layer.of(KIND, form, batch.num_pages)), Variant(name))
    torch.cuda.synchronize()


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of calls one after the other."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def times(graphs: Mapping[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Microseconds of a layer, by column: medians of rounds in which each graph is replayed, and replayed again."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    torch.cuda.synchronize()
    time.sleep(SETTLING_S)
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1000 / NUM_LAYERS)
    return {name: statistics.median(us) for name, us in found.items()}


def has_bits(expected: Sequence[Tensor], batch: Batch, layer: SharedLayer, variant: Variant) -> bool:
    """Whether a column has the bits that are served, whatever was in new memory."""
    with poisoned():
        found = [batch.run(layer, variant) for _ in range(CHECKS)]
    found += [batch.run(layer, variant) for _ in range(CHECKS)]
    return all(torch.equal(a, b) for pair in found for a, b in zip(pair, expected, strict=True))


def measure(report: Report, form: str, rate: float) -> None:
    """Times of layers of a format, and of gate and up alone."""
    batches = [Batch(KIND, *shape) for shape in BATCHES]
    first = SharedLayer.like(Layer.of(KIND, form, max(batch.num_pages for batch in batches)))
    layers = [first, *(first.copy() for _ in range(NUM_LAYERS - 1))]
    for shape, batch in zip(BATCHES, batches, strict=True):
        rows = f"{shape[0]} x {shape[1]}"
        expected = [tensor.clone() for tensor in batch.run(first, Variant(SERVED))]
        whole, alone = {}, {}
        for variant in map(Variant, COLUMNS):
            if not has_bits(expected, batch, first, variant):
                report.fault(f"{form} {rows}, {variant.name}: other bits")
            whole[variant.name] = captured([partial(batch.run, layer, variant) for layer in layers])
            alone[variant.name] = captured([partial(layer.gelu, batch.normed_TH, variant) for layer in layers])
        for what, graphs, read in (("layer", whole, first.weights), ("gate and up", alone, ("gate_up",))):
            us, floor = times(graphs), first.read_bytes(read) / rate * 1e6
            changes = [f"{us[name] - us[SERVED]:+.1f}" for name in COLUMNS[1:]]
            cells = [f"{form}, {what}", rows, f"{floor:.1f}", f"{us[SERVED]:.1f}", *changes]
            report.row(what, f"| {' | '.join(cells)} |", format=form, batch=shape, floor=floor, us=us)
        for name in TILES:
            if any(bool(layer.are_there[name].any()) for layer in layers):
                report.fault(f"{form} {rows}, {name}: sums are left, from which the next product would go on")


def main() -> None:
    """Compile in several processes, then measure in this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int4,nvfp4")
    parser.add_argument("--out", type=Path, help="a file for all numbers")
    arguments = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    formats = arguments.formats.split(",")
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.starmap(compile_programs, [(form, name) for form in formats for name in (SERVED, *TILES)], chunksize=1)
    rate = read_rate()
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(f"{device}; a sum reads {rate / 1e12:.2f} TB/s; compiled {time.monotonic() - began:.0f} s\n", flush=True)
    columns = ("31B sliding", "sequences x rows", "floor", *COLUMNS)
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)
    report = Report()
    for form in formats:
        measure(report, form, rate)
        if arguments.out:
            found = {"device": device, "rate": rate, "rows": report.rows, "faults": report.faults}
            arguments.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"\n{time.monotonic() - began:.0f} s, {len(report.faults)} faults")
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
