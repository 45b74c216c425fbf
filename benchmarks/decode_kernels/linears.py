"""Tiles of `gemray_kernels.triton.linear` for every weight shape, beside cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from decode_kernels.measure import CACHE_BYTES, CEILING, Report, early, error, median_us, poisoned, random
from decode_kernels.weights import WEIGHTS, Weight, candidates
from gemray_kernels.reference import activation
from gemray_kernels.table import REFERENCE
from gemray_kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.triton.linear import Gate, LinearTile, gated_linear_in_tiles, linear_in_tiles

ROWS = (1, 5, 8, 16, 33, 64)
FASTEST = 5
"""Tiles that are timed at more rows, of all that are timed at one."""


def linears(report: Report, only: str) -> None:
    """Sweep the tiles of every weight whose model and name contain `only`."""
    pool = random(1 << 31)
    print("| model | weight | kind | MB | floor | library 1 / 8 / 16 / 64 | tile | 1 / 8 / 16 / 64 | early 1 / 8 |")
    for weight in WEIGHTS:
        if only in f"{weight.model} {weight.name}":
            sweep(report, weight, pool)


def sweep(report: Report, weight: Weight, pool: Tensor) -> None:
    """Time the tiles of one weight over copies of it in `pool`, and check the one chosen."""
    count = max(2, min(16, 3 * CACHE_BYTES // weight.bytes + 1, pool.nbytes // weight.bytes))
    size = weight.num_out * weight.num_in
    sets = [pool[c * size : (c + 1) * size].view(weight.num_out, weight.num_in) for c in range(count)]
    xs = {t: random(t, weight.num_in, gain=weight.num_in**-0.5) for t in ROWS}
    library = {t: median_us([partial(run_library, weight, xs[t], w) for w in sets]) for t in (1, 8, 16, 64)}
    found: dict[LinearTile, dict[str, float]] = {}
    with early(False):
        for tile in candidates(weight):
            try:
                found[tile] = {"1": tile_us(weight, tile, xs[1], sets)}
            except Exception as reason:
                found[tile] = {"1": float("inf")}
                report.refused(tile, reason)
        best = sorted(found, key=lambda tile: found[tile]["1"])[:FASTEST]
        for tile in best:
            found[tile] |= {str(t): tile_us(weight, tile, xs[t], sets) for t in (8, 16)}
        chosen = min(best, key=lambda tile: found[tile]["1"] + found[tile]["8"])
        times = found[chosen] | {"64": tile_us(weight, chosen, xs[64], sets)}
    with early(True):
        times |= {f"early {t}": tile_us(weight, chosen, xs[t], sets) for t in (1, 8)}
    check(report, weight, chosen, xs[64], sets[0])
    numbers = [f"{times[key]:.1f}" for key in ("1", "8", "16", "64", "early 1", "early 8")]
    report.row(
        "linears",
        f"| {weight.model} | {weight.name} | {weight.kind} | {weight.bytes / 1e6:.1f} | "
        f"{weight.bytes / CEILING * 1e6:.1f} | {' / '.join(f'{t:.1f}' for t in library.values())} | "
        f"{short(chosen)} | {' / '.join(numbers[:4])} | {' / '.join(numbers[4:])} |",
        weight=asdict(weight),
        library=library,
        tile=asdict(chosen),
        times=times,
        all=[{"tile": asdict(tile), **value} for tile, value in found.items()],
    )


def tile_us(weight: Weight, tile: LinearTile, x: Tensor, sets: Sequence[Tensor]) -> float:
    """Microseconds of one product in a tile."""
    return median_us([partial(run_linear, weight, x, w, tile) for w in sets])


def run_linear(weight: Weight, x: Tensor, w: Tensor, tile: LinearTile) -> Tensor:
    """The product as the tile's kernel gives it: summands where it splits."""
    if weight.kind in ("gelu", "silu"):
        return gated_linear_in_tiles(x, w, tile, Gate[weight.kind.upper()])
    narrow = tile.splits == 1 and weight.kind != "wide"
    return linear_in_tiles(x, w, tile, out_dtype=x.dtype if narrow else torch.float32)


def run_library(weight: Weight, x: Tensor, w: Tensor) -> Tensor:
    """The product by cuBLAS, and the gate's kernel behind it."""
    if weight.kind == "wide":
        return REFERENCE.wide_summands(x, w)
    y = torch.nn.functional.linear(x, w)
    match weight.kind:
        case "gelu":
            return gelu_tanh_and_mul(y)
        case "silu":
            return silu_and_mul(y)
    return y


def expected_linear(weight: Weight, x: Tensor, w: Tensor) -> Tensor:
    """The product in float64, a part of the outputs at a time."""
    y = torch.cat([x.double() @ part.double().t() for part in w.split(1 << 16)], dim=1)
    match weight.kind:
        case "gelu":
            return activation.gelu_tanh_and_mul(y)
        case "silu":
            return activation.silu_and_mul(y)
    return y


def short(tile: LinearTile) -> str:
    """A tile in a table's cell."""
    order = "W" if tile.weight_first else "x"
    return f"{order} {tile.outputs}x{tile.inputs} w{tile.num_warps} s{tile.num_stages} /{tile.splits}"


def check(report: Report, weight: Weight, tile: LinearTile, x_64: Tensor, w: Tensor) -> None:
    """Compare with float64, and a row's bits at other numbers of rows with those at 64."""
    expected = expected_linear(weight, x_64, w)
    with poisoned():
        whole = run_linear(weight, x_64, w, tile)
        parts = {t: run_linear(weight, x_64[:t], w, tile) for t in (1, 5, 16, 33)}
    summed = whole.float().sum(0) if whole.dim() == 3 else whole
    if not (wrong := error(summed, expected)) < 1e-2:
        report.fault(f"{weight} {tile}: error {wrong} at 64 rows")
    for t, part in parts.items():
        if not torch.equal(part, whole[:, :t] if whole.dim() == 3 else whole[:t]):
            report.fault(f"{weight.model} {weight.name} {short(tile)}: bits at {t} rows differ from those at 64")
