"""Times products of 65 to 160 rows with packed weights in tiles of `packed_even`, beside those of prompts.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python -m packed_kernels.even --out results.json

As `packed_kernels.verify`: each product alone, and in a layer of 31B in which the others are those of prompts. What
tiles give is compared first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import triton
from torch import Tensor

from decode_kernels.measure import median_us, random
from decode_kernels.weights import WEIGHTS, Weight
from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.triton import packed_products
from gemray_kernels.triton.attention_inputs import attention_inputs
from gemray_kernels.triton.layer_norms import add_then_norms
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_even import EvenTile, packed_even_gated_linear, packed_even_linear
from packed_kernels.timing import copies
from packed_kernels.verify import LAYER, LAYERS
from support.kernels.packed_cases import FORMATS

GROUPS = ((128, 2), (64, 3), (64, 2))
"""Outputs of a group, and groups."""
ROWS = {80: (64, 16), 128: (128, 0), 160: (128, 32)}
TOLERANCE = 5e-3
"""Between products of the same numbers, whose results are rounded to bfloat16."""


def tiles(weight: Weight, rows: int) -> list[EvenTile]:
    """Those that are tried: in parts whose programs fill the multiprocessors, and with shares."""
    found = []
    for outputs, groups in GROUPS:
        if (outputs, rows) == (128, 160):
            continue  # more sums than there are registers
        tile = EvenTile(outputs, groups, *ROWS[rows])
        found += [tile, EvenTile(outputs, groups, *ROWS[rows], shares=True)]
        parts = {(128, 2): 6, (64, 3): 4, (64, 2): 3}[outputs, groups]
        if weight.kind != "gelu":
            found.append(EvenTile(outputs, groups, *ROWS[rows], splits=parts if weight.num_out < 8192 else 2))
    return found


def product(x: Tensor, weight: Weight, packed: TiledWeight, tile: EvenTile | None) -> Tensor:
    """In a tile, or as prompts have it; summands, or gated."""
    if tile is not None and weight.kind == "gelu":
        return packed_even_gated_linear(x, packed, tile, Gate.GELU)
    if tile is not None:
        return packed_even_linear(x, packed, tile, out_dtype=x.dtype if tile.splits == 1 else torch.float32)
    none = {"even_tile": lambda *_, **__: None, "gated_even_tile": lambda *_: None}
    with mock.patch.multiple(packed_products, **none):
        served = packed_products.TiledProduct(packed)
        return served.gelu(x) if weight.kind == "gelu" else served.summands(x)


def differs(weight: Weight, packed: TiledWeight, tile: EvenTile, rows: int) -> str | None:
    """What is wrong with a tile: its results, or a row's bits at another place and beside other rows."""
    x = random(rows, weight.num_in)
    turned = torch.cat([x[-1:], random(rows - 2, weight.num_in), x[:1]])
    found, wanted, other = (product(rows_, weight, packed, of) for rows_, of in ((x, tile), (x, None), (turned, tile)))
    shape = (-1, rows, found.shape[-1])
    found, other, wanted = found.view(shape), other.view(shape), wanted.view(shape).sum(0, dtype=torch.float64)
    error = float((found.sum(0, dtype=torch.float64) - wanted).norm() / wanted.norm())
    if not error < TOLERANCE:
        return f"{error} of the norm away"
    same = torch.equal(other[:, 0], found[:, -1]) and torch.equal(other[:, -1], found[:, 0])
    return None if same else "a row's bits depend on its place or on others"


def layer_us(sets: Mapping[str, Sequence[TiledWeight]], rows: int, chosen: Mapping[str, EvenTile]) -> float:
    """Microseconds of a layer whose products have these tiles."""
    weights = {weight.name: weight for weight in WEIGHTS if weight.model == "31B"}
    residual, heads, cos, sin = random(rows, 5376), random(rows, 8192), random(rows, 1, 256), random(rows, 1, 256)
    norm, head_norm = Norm(random(5376), 1e-6), Norm(random(256), 1e-6)

    def of(name: str, x: Tensor, number: int) -> Tensor:
        return product(x, weights[name], sets[name][number % len(sets[name])], chosen.get(name))

    def one(number: int) -> None:
        hidden = add_then_norms(residual, of("o sliding", heads, number), norm, None, [norm])[1]
        hidden = add_then_norms(residual, of("down", of("gate_up", hidden, number), number), norm, None, [norm])[1]
        attention_inputs(of("qkv sliding", hidden, number), cos, sin, 64, head_norm, None)

    return median_us([partial(one, number) for number in range(LAYERS)])


def measure(name: str, rows: int) -> dict[str, object]:
    """Microseconds by product and tile."""
    weights = [next(w for w in WEIGHTS if (w.model, w.name) == ("31B", of)) for of in LAYER]
    sets = {weight.name: copies(FORMATS[name], weight)[0] for weight in weights}
    found: dict[str, object] = {"layer": layer_us(sets, rows, {})}
    for weight in weights:
        x = random(rows, weight.num_in)
        for tile in (None, *tiles(weight, rows)):
            wrong = None if tile is None else differs(weight, sets[weight.name][0], tile, rows)
            alone = median_us([partial(product, x, weight, packed, tile) for packed in sets[weight.name]])
            layer = layer_us(sets, rows, {} if tile is None else {weight.name: tile})
            found[f"{weight.name} {tile}"] = {"alone": alone, "layer": layer, "wrong": wrong}
            print(f"{name} {rows} {weight.name} {tile}: {alone:.1f}, layer {layer:.1f} {wrong or ''}", flush=True)
    return found


def main() -> None:
    """Measure every format and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int4 group 32")
    parser.add_argument("--rows", default="80,128,160")
    parser.add_argument("--out", type=Path, help="a file for all numbers")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    results = {}
    for name in arguments.formats.split(","):
        for rows in map(int, arguments.rows.split(",")):
            results[f"{name} {rows}"] = measure(name, rows)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
