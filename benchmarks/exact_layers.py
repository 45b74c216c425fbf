"""Times a layer of 31B with packed weights in exact numerics, as it is served and without what makes it faster.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python benchmarks/exact_layers.py [--out results.json] \
        [--formats int4,nvfp4,fp8]

Medians of replays of CUDA graphs over layers whose weights exceed the cache together, all columns in turn, in
microseconds a layer:

- `served`: as requests have it;
- `late`: no product asks for its weight before rows are there;
- `two parts`: late, and NVFP4's numbers are products with the scale and then with both parts of the factor;
- `small units`: so, and NVFP4's units are 64 inputs, as they were before 2026-11-30.

The last two are of NVFP4 alone. All must give the same bits; the run ends with 1 where they do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import triton
from torch import Tensor
from typing_extensions import override

import layer_kernels
from decode_kernels.measure import median_us, random
from gemray_kernels.numerics import NUM_SHARDS
from gemray_kernels.packed_product import PackedProduct
from gemray_kernels.packed_tiles import UNITS, TiledWeight, laid_out
from gemray_kernels.triton import exact_packed, factor_parts
from gemray_kernels.triton.exact_attention import exact_paged_attention
from gemray_kernels.triton.exact_packed import TiledExactProduct
from layer_kernels import KINDS, NOW, PACKED, Batch, Kind, Layer, Variant
from support.kernels.packed_cases import FORMATS, random_packed

BATCHES = ((1, 1), (1, 5), (8, 1))
NUM_LAYERS = 4
FACTOR = 0.0421
"""Scale of scales times NVFP4's own factor: published weights have one or a few."""


@dataclass(frozen=True)
class Column:
    """What is left out."""

    name: str
    ahead: bool = True
    short: bool = True
    large: bool = True

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Weights that are built, and products that are computed meanwhile are this column's."""
        with ExitStack() as patches:
            if not self.ahead:
                for name in ("ahead_tile", "gated_ahead_tile"):
                    patches.enter_context(mock.patch.object(exact_packed, name, return_value=None))
            if not self.short:
                patches.enter_context(mock.patch.object(factor_parts, "short_parts_of", _none))
            yield


SERVED = Column("served")
LATE = Column("late", ahead=False)
TWO_PARTS = Column("two parts", ahead=False, short=False)
SMALL_UNITS = Column("small units", ahead=False, short=False, large=False)


def _none(factor_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return factor_N, factor_N, torch.zeros_like(factor_N, dtype=torch.bool)


@dataclass(frozen=True)
class ExactLayer(Layer):
    """A layer whose products are exact."""

    products: Mapping[str, PackedProduct]

    @classmethod
    def random(cls, kind: Kind, form: str, num_pages: int, column: Column) -> ExactLayer:
        """A layer of the same random numbers in every column."""
        torch.manual_seed(0)
        shapes = {
            "qkv": (kind.qkv, kind.hidden, 1),
            "o": (kind.hidden, kind.heads * kind.head_dim, NUM_SHARDS),
            "gate_up": (2 * kind.width, kind.hidden, 1),
            "down": (kind.hidden, kind.width, NUM_SHARDS),
        }
        weights = {name: _weight(form, *shape, column) for name, shape in shapes.items()}
        pages = [random(num_pages, layer_kernels.PAGE_SIZE, kind.kv_heads, kind.head_dim) for _ in range(2)]
        return cls.of_weights(kind, weights, *pages)

    @classmethod
    def of_weights(cls, kind: Kind, weights: Mapping[str, TiledWeight], k_pages: Tensor, v_pages: Tensor) -> ExactLayer:
        """A layer of these weights."""
        products = {name: TiledExactProduct(weight) for name, weight in weights.items()}
        return cls(kind, weights, k_pages, v_pages, products)

    @override
    def copy(self) -> ExactLayer:
        weights = {
            name: replace(weight, words_BOC=weight.words_BOC.clone(), scale_BO=weight.scale_BO.clone())
            for name, weight in self.weights.items()
            if isinstance(weight, TiledWeight)
        }
        return self.of_weights(self.kind, weights, self.k_pages.clone(), self.v_pages.clone())

    @override
    def summands(self, name: str, x_TI: Tensor, variant: Variant) -> Tensor:
        return self.products[name].summands(x_TI)

    @override
    def gelu(self, x_TI: Tensor, variant: Variant) -> Tensor:
        return self.products["gate_up"].gelu(x_TI)


def _weight(form: str, num_out: int, num_in: int, leaves: int, column: Column) -> TiledWeight:
    weight = random_packed(FORMATS[PACKED[form]], num_out, num_in, device="cuda", seed=num_out, leaves=leaves)
    assert weight.tiling is not None
    words = weight.tiling.words if column.large else UNITS[weight.code.name].words
    laid = laid_out(weight, replace(weight.tiling, words=words))
    return replace(laid, factor_O=torch.full_like(laid.factor_O, FACTOR)) if form == "nvfp4" else laid


def measure(form: str, columns: Sequence[Column]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Microseconds a layer by batch and column, and what gave other bits than the first column."""
    kind = KINDS[0]
    batches = {f"{s} x {rows}": Batch(kind, s, rows) for s, rows in BATCHES}
    num_pages = max(batch.num_pages for batch in batches.values())
    layers: dict[str, list[ExactLayer]] = {}
    for column in columns:
        with column.taken():
            first = ExactLayer.random(kind, form, num_pages, column)
            layers[column.name] = [first, *(first.copy() for _ in range(NUM_LAYERS - 1))]
    found: dict[str, dict[str, float]] = {}
    differ: list[str] = []
    for name, batch in batches.items():
        expected: Sequence[Tensor] = ()
        found[name] = {}
        for column in (*columns, columns[0]):
            with column.taken():
                result = [tensor.clone() for tensor in batch.run(layers[column.name][0], NOW)]
                us = median_us([partial(batch.run, layer, NOW) for layer in layers[column.name]])
            again = " again" if column.name in found[name] else ""
            found[name][column.name + again] = us
            expected = expected or result
            if not all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)):
                differ.append(f"{form} {name} {column.name}")
        print(f"{form} {name}: " + ", ".join(f"{column} {us:.1f}" for column, us in found[name].items()), flush=True)
    return found, differ


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int4,nvfp4,fp8")
    parser.add_argument("--out", type=Path, help="a file for all numbers")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    results, faults = {}, []
    with mock.patch.object(layer_kernels, "paged_attention", exact_paged_attention):
        for form in arguments.formats.split(","):
            columns = (SERVED, LATE, TWO_PARTS, SMALL_UNITS) if form == "nvfp4" else (SERVED, LATE)
            results[form], differ = measure(form, columns)
            faults += differ
            torch.cuda.empty_cache()
            if arguments.out:
                arguments.out.write_text(json.dumps(results))
    print("".join(f"FAULT other bits: {fault}\n" for fault in faults), end="")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
