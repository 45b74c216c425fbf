"""What exact numerics cost in the products of linear layers, weight by weight.

    PYTHONPATH=benchmarks:kernels:workers python -m exact_products [--model 31B] [--out FILE.md]

Each cell is fast numerics, exact numerics and their ratio, in microseconds of device time in a replayed graph. What a
product writes is read again: products whose inputs ranks split (o, down) are measured with the sum and the norms behind
them, as a layer runs them, and gated products with their gate. Weights do not stay in the cache between two calls.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from decode_kernels.measure import CACHE_BYTES, median_us, random
from decode_kernels.weights import WEIGHTS, Weight
from gemray_kernels.numerics import NUM_SHARDS, leaves_of
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.table import ExactProducts, Kernels, triton_exact_products, triton_kernels

ROWS = (1, 8, 32, 64, 512, 2048, 8192)
MODELS = ("31B", "26B-A4B", "E4B")
MOST_HEAD_ROWS = 64
"""A head scores no more rows at a time."""
REPLAYS = 5


def main() -> None:
    """Print the table; write it where --out says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="the default is all of them")
    parser.add_argument("--rows", type=int, action="append", help="the default is 1 to 8192")
    parser.add_argument("--seconds", type=float, default=85, help="begin no other weight after so long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = arguments.rows or ROWS
    began = time.monotonic()
    torch.manual_seed(0)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bfloat16.",
        "",
        "| weight, outputs x inputs | " + " | ".join(f"{count} rows" for count in rows) + " |",
        "| --- |" + " --- |" * len(rows),
    ]
    for weight in (w for w in WEIGHTS if w.model in (arguments.model or MODELS)):
        if time.monotonic() - began > arguments.seconds:
            lines.append(f"| not run: {weight.model} {weight.name} and what follows |")
            break
        cells = [cell(weight, count) for count in rows]
        lines.append(f"| {weight.model} {weight.name}, {weight.num_out} x {weight.num_in} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    table = "\n".join(lines) + "\n"
    print(table)
    if arguments.out is not None:
        arguments.out.write_text(table, encoding="utf-8")


def cell(weight: Weight, rows: int) -> str:
    """Fast and exact microseconds of one weight at one number of rows."""
    if weight.name == "head" and rows > MOST_HEAD_ROWS:
        return "-"
    copies = max(2, min(24, 3 * CACHE_BYTES // weight.bytes))
    weights = [random(weight.num_out, weight.num_in, gain=0.02) for _ in range(copies)]
    x = random(rows, weight.num_in)
    fast, exact = (
        median_us([partial(call, x, w) for w in weights], REPLAYS)
        for call in (fast_call(weight, rows), exact_call(weight, rows))
    )
    return f"{fast:.1f} {exact:.1f} ({exact / fast:.2f})"


def fast_call(weight: Weight, rows: int) -> Callable[[Tensor, Tensor], object]:
    """The product as fast numerics compute it."""
    kernels = triton_kernels()
    if is_split(weight):
        reader = reader_of(kernels, rows, weight.num_out)
        return lambda x, w: reader(kernels.summands(x, w))
    calls: dict[str, Callable[[Tensor, Tensor], object]] = {
        "gelu": kernels.gelu_linear,
        "wide": kernels.wide_summands,
        "whole": kernels.linear,
        "summands": kernels.summands,
    }
    return calls[weight.kind]


def exact_call(weight: Weight, rows: int) -> Callable[[Tensor, Tensor], object]:
    """The same product in exact numerics."""
    kernels, products = triton_kernels(), triton_exact_products()
    if is_split(weight):
        reader = reader_of(kernels, rows, weight.num_out)
        return lambda x, w: reader(products.summands(x, w, NUM_SHARDS))
    leaves = leaves_of(weight.num_out, weight.num_in)
    call = call_of(products, weight.kind)
    return lambda x, w: call(x, w, leaves)


def call_of(products: ExactProducts, kind: str) -> Callable[[Tensor, Tensor, int], object]:
    """The exact product of a weight's kind."""
    calls: dict[str, Callable[[Tensor, Tensor, int], object]] = {
        "gelu": products.gelu_linear,
        "wide": products.wide_summands,
        "whole": products.linear,
        "summands": products.summands,
    }
    return calls[kind]


def is_split(weight: Weight) -> bool:
    """Whether ranks split the weight's inputs."""
    return weight.name.startswith(("o ", "down"))


def reader_of(kernels: Kernels, rows: int, width: int) -> Callable[[Tensor], object]:
    """What adds up the summands: the sum's norm, the residual sum, and the next norm."""
    residual, norm = random(rows, width), Norm(random(width), 1e-6)
    return lambda summands: kernels.add_then_norms(residual, summands, norm, None, [norm])


if __name__ == "__main__":
    main()
