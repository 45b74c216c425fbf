"""Times a layer's kernels one after the other, as a decode step has them, and what other ways to run them would save.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python benchmarks/layer_kernels.py [--out results.json] \
        [--only "31B sliding"] [--formats bf16,int4,nvfp4,fp8]

Medians of replays of a CUDA graph over layers whose weights and pages exceed the cache together; programs are compiled
in several processes first. Each line is a batch
(sequences x rows of each) of one kind of layer in one format; `now` is what is served, and every other column what a
variant takes more or less than that, in microseconds a layer:

- `early`, `late`: products start while the kernel before still runs, or when it has ended, by `linear` or
  `packed_linear`, which ask for no weights ahead;
- `parts`: the products before norms are cut into fewer parts, which norms read, and multiplied likewise;
- `norms w8`, `w32`: a row's norms in so many warps (16 for 31B's rows, 8 or less for narrower ones);
- `-norms`, `-inputs`, `-attention`: the layer without these kernels, in which its results are wrong: most that joining
  them with others could save.

Variants that compute the same must give the same bits; the run ends with 1 where they do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from unittest import mock

import torch
import triton
from torch import Tensor

from decode_kernels.measure import CACHE_BYTES, DEVICE, median_us, random
from gemray_kernels.packed_tiles import TiledWeight, laid_out
from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.keys_of_values import KeysOfValues
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.triton import layer_norms, linear_choice
from gemray_kernels.triton.attention_inputs import attention_inputs
from gemray_kernels.triton.linear import Gate, LinearTile, gated_linear_in_tiles, linear_in_tiles
from gemray_kernels.triton.linear_tiles import gated_tile, tile_of_summands
from gemray_kernels.triton.packed_linear import PackedTile, packed_gated_linear_in_tiles, packed_linear_in_tiles
from gemray_kernels.triton.packed_products import TiledProduct
from gemray_kernels.triton.packed_tile_choice import gated_tile as packed_gated_tile
from gemray_kernels.triton.packed_tile_choice import tile_of_summands as packed_tile_of_summands
from gemray_kernels.triton.paged_attention import paged_attention
from support.kernels.packed_cases import FORMATS, random_packed

PAGE_SIZE = 16
KEYS = 640
BATCHES = ((1, 1), (1, 2), (1, 5), (4, 1), (8, 1), (16, 1))
PACKED = {"int4": "int4 group 32", "nvfp4": "nvfp4", "fp8": "fp8 channel"}
ONE_PART = LinearTile(outputs=64, inputs=128, num_warps=4, num_stages=7)
"""The fastest of bfloat16 whose inputs are not cut (`results/2026-11-28-h100-products`)."""


@dataclass(frozen=True)
class Kind:
    """A kind of layer: its attention and its dense MLP."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    width: int
    has_v: bool = True

    @property
    def qkv(self) -> int:
        """Outputs of the first product."""
        return (self.heads + (1 + self.has_v) * self.kv_heads) * self.head_dim


KINDS = (
    Kind("31B sliding", 5376, 32, 16, 256, 1024, 21504),
    Kind("31B full", 5376, 32, 4, 512, None, 21504, has_v=False),
    Kind("26B-A4B sliding", 2816, 16, 8, 256, 1024, 2112),
    Kind("E4B sliding", 2560, 8, 2, 256, 512, 10240),
    Kind("E2B sliding", 1536, 8, 1, 256, 512, 6144),
)


TileT = TypeVar("TileT", LinearTile, PackedTile)


@dataclass(frozen=True)
class Variant:
    """How a layer's kernels are run."""

    name: str
    fewer_parts: bool = False
    norm_warps: int | None = None
    early: bool | None = None
    without: str = ""

    @property
    def has_served_products(self) -> bool:
        """Whether products are those that are served, most of which ask for weights ahead."""
        return self.early is None and not self.fewer_parts

    def started(self, tile: TileT) -> TileT:
        """A tile that starts as the variant says."""
        return tile if self.early is None else replace(tile, early=self.early)


NOW = Variant("now")
VARIANTS = (
    Variant("early", early=True),
    Variant("late", early=False),
    Variant("parts", fewer_parts=True),
    Variant("norms w8", norm_warps=8),
    Variant("norms w32", norm_warps=32),
    Variant("-norms", without="norms"),
    Variant("-inputs", without="inputs"),
    Variant("-attention", without="attention"),
)


@dataclass(frozen=True)
class Layer:
    """Weights and pages of one layer."""

    kind: Kind
    weights: Mapping[str, Tensor | TiledWeight]
    k_pages: Tensor
    v_pages: Tensor

    @classmethod
    def of(cls, kind: Kind, form: str, num_pages: int) -> Layer:
        """A layer of random numbers."""
        shapes = {
            "qkv": (kind.qkv, kind.hidden),
            "o": (kind.hidden, kind.heads * kind.head_dim),
            "gate_up": (2 * kind.width, kind.hidden),
            "down": (kind.hidden, kind.width),
        }
        pages = [random(num_pages, PAGE_SIZE, kind.kv_heads, kind.head_dim) for _ in range(2)]
        return cls(kind, {name: _weight(form, *shape) for name, shape in shapes.items()}, *pages)

    def copy(self) -> Layer:
        """The same numbers elsewhere."""
        weights = {name: _copied(weight) for name, weight in self.weights.items()}
        return Layer(self.kind, weights, self.k_pages.clone(), self.v_pages.clone())

    @property
    def weight_bytes(self) -> int:
        """Bytes of codes and of plain numbers."""
        return sum(w.nbytes if isinstance(w, Tensor) else w.words_BOC.nbytes for w in self.weights.values())

    def summands(self, name: str, x_TI: Tensor, variant: Variant) -> Tensor:
        """A product as its reader takes it."""
        weight = self.weights[name]
        fewer = variant.fewer_parts and name != "qkv"
        if isinstance(weight, TiledWeight):
            if variant.has_served_products:
                return TiledProduct(weight).summands(x_TI)
            packed = variant.started(packed_tile_of_summands(weight, weight.num_out, len(x_TI)))
            if fewer and packed.splits > 1 and packed.outputs == 64:
                packed = replace(packed, outputs=32, splits=-(-packed.splits // 2))
            dtype = x_TI.dtype if packed.splits == 1 else torch.float32
            return packed_linear_in_tiles(x_TI, weight, packed, out_dtype=dtype)
        if variant.has_served_products:
            return linear_choice.summands(x_TI, weight)
        tile = variant.started(tile_of_summands(len(x_TI), *weight.shape))
        if fewer:
            tile = ONE_PART if tile.splits <= 3 else replace(tile, splits=tile.splits // 2)
        return linear_in_tiles(x_TI, weight, tile, out_dtype=x_TI.dtype if tile.splits == 1 else torch.float32)

    def o_comes_ahead(self, num_rows: int) -> bool:
        """Whether the o projection asks for its weight before its rows are there."""
        weight = self.weights["o"]
        if isinstance(weight, TiledWeight):
            return TiledProduct(weight).comes_ahead(num_rows)
        return linear_choice.STARTS.comes_ahead(weight, num_rows)

    def starts_at_once(self, name: str, num_rows: int) -> bool:
        """Whether the norm before a product lets it start at once."""
        weight, starts = self.weights[name], linear_choice.STARTS
        if isinstance(weight, TiledWeight):
            return False
        return (starts.gate_at_once if name == "gate_up" else starts.at_once)(weight, num_rows)

    def gelu(self, x_TI: Tensor, variant: Variant) -> Tensor:
        """The gated product."""
        weight = self.weights["gate_up"]
        if isinstance(weight, TiledWeight):
            if variant.has_served_products:
                return TiledProduct(weight).gelu(x_TI)
            packed = variant.started(packed_gated_tile(weight, len(x_TI)))
            return packed_gated_linear_in_tiles(x_TI, weight, packed, Gate.GELU)
        if variant.has_served_products:
            return linear_choice.gelu_linear(x_TI, weight)
        return gated_linear_in_tiles(x_TI, weight, variant.started(gated_tile(len(x_TI), len(weight))), Gate.GELU)


def _weight(form: str, num_out: int, num_in: int) -> Tensor | TiledWeight:
    if form == "bf16":
        return random(num_out, num_in, gain=num_in**-0.5)
    weight = random_packed(FORMATS[PACKED[form]], num_out, num_in, device="cuda")
    assert weight.tiling is not None
    return laid_out(weight, weight.tiling)


def _copied(weight: Tensor | TiledWeight) -> Tensor | TiledWeight:
    if isinstance(weight, Tensor):
        return weight.clone()
    return replace(weight, words_BOC=weight.words_BOC.clone(), scale_BO=weight.scale_BO.clone())


class Batch:
    """Rows of sequences of equal lengths, and a layer's calls over them."""

    def __init__(self, kind: Kind, sequences: int, rows: int) -> None:
        """Random rows, at the end of `KEYS` keys of each sequence."""
        self._kind = kind
        self._rows = rows
        pages = -(-KEYS // PAGE_SIZE)
        self.num_pages = 1 + sequences * pages
        self._table_SP = torch.zeros(sequences, 512, device=DEVICE, dtype=torch.int32)
        self._table_SP[:, :pages] = 1 + torch.randperm(sequences * pages, device=DEVICE).view(sequences, pages)
        self._start_Z = torch.arange(sequences + 1, device=DEVICE, dtype=torch.int32) * rows
        self._kv_len_S = torch.full((sequences,), KEYS, device=DEVICE, dtype=torch.int32)
        place_T = KEYS - rows + torch.arange(rows, device=DEVICE).repeat(sequences)
        page_T = self._table_SP.repeat_interleave(rows, 0).gather(1, (place_T // PAGE_SIZE)[:, None])[:, 0]
        self._kv_index_T = page_T.long() * PAGE_SIZE + place_T % PAGE_SIZE
        num_rows = sequences * rows
        angle_T1D = torch.rand(num_rows, 1, kind.head_dim, device=DEVICE) * 6
        self._cos, self._sin = angle_T1D.cos().bfloat16(), angle_T1D.sin().bfloat16()
        self._norm, self._head_norm = Norm(random(kind.hidden), 1e-6), Norm(random(kind.head_dim), 1e-6)
        self.x_TH, self.normed_TH = random(num_rows, kind.hidden), random(num_rows, kind.hidden)
        self._q_TND = random(num_rows, kind.heads, kind.head_dim)
        self._o_TND = random(num_rows, kind.heads, kind.head_dim)

    def run(self, layer: Layer, variant: Variant) -> tuple[Tensor, Tensor]:
        """The stream behind the layer and its norm."""
        o_TND = self._attended(layer, variant)
        rows, lets = len(self.x_TH), variant.has_served_products
        x_TH, normed_TH = self._normed(
            self.x_TH,
            layer.summands("o", o_TND.flatten(1), variant),
            variant,
            lets_at_once=lets and layer.starts_at_once("gate_up", rows),
        )
        return self._normed(
            x_TH,
            layer.summands("down", layer.gelu(normed_TH, variant), variant),
            variant,
            lets_at_once=lets and layer.starts_at_once("qkv", rows),
        )

    def _attended(self, layer: Layer, variant: Variant) -> Tensor:
        qkv_STO = layer.summands("qkv", self.normed_TH, variant)
        write = KVWrite(self._head_norm, True, layer.k_pages, layer.v_pages, self._kv_index_T)
        pages, tables = (layer.k_pages, layer.v_pages), (self._table_SP, self._start_Z, self._kv_len_S)
        q_TND = self._q_TND
        if variant.without != "inputs":
            q_TND = attention_inputs(qkv_STO, self._cos, self._sin, self._kind.heads, self._head_norm, write)
        if variant.without == "attention":
            return self._o_TND
        return paged_attention(
            q_TND,
            *pages,
            *tables,
            window=self._kind.window,
            causal=True,
            scale=1.0,
            most_rows=self._rows,
            keys_of_values=None if self._kind.has_v else KeysOfValues(self._head_norm.weight_D, 64),
            reader_comes_ahead=variant.has_served_products and layer.o_comes_ahead(len(self.x_TH)),
        )

    def _normed(
        self, x_TH: Tensor, summands_STH: Tensor, variant: Variant, *, lets_at_once: bool
    ) -> tuple[Tensor, Tensor]:
        if variant.without == "norms":
            return x_TH, self.normed_TH
        warps: AbstractContextManager[object] = nullcontext()
        if variant.norm_warps is not None:
            warps = mock.patch.object(layer_norms, "warps_for", return_value=variant.norm_warps)
        with warps:
            x_TH, normed_TH = layer_norms.add_then_norms(
                x_TH, summands_STH, self._norm, None, [self._norm], lets_at_once=lets_at_once
            )
        return x_TH, normed_TH


def times(batch: Batch, layers: Sequence[Layer], variants: Sequence[Variant]) -> tuple[dict[str, float], list[str]]:
    """Microseconds a layer by variant, and variants whose bits differ from those of what is served."""
    expected = [result.clone() for result in batch.run(layers[0], NOW)]
    found, differ = {}, []
    for variant in (NOW, *variants):
        calls: list[Callable[[], object]] = [partial(batch.run, layer, variant) for layer in layers]
        found[variant.name] = median_us(calls)
        if variant.early is not None:
            pairs = zip(batch.run(layers[0], variant), expected, strict=True)
            differ += [] if all(torch.equal(a, b) for a, b in pairs) else [variant.name]
    return found, differ


def work(formats: Sequence[str], only: str) -> Iterator[tuple[str, Kind]]:
    """Formats and kinds of layers to measure; packed weights are 31B's."""
    for form in formats:
        for kind in KINDS:
            if only in kind.name and (form == "bf16" or kind.name.startswith("31B")):
                yield form, kind


def compile_all(formats: Sequence[str], only: str) -> None:
    """Compile every program, in a process for each format and kind, so that they lie in the cache on disk."""
    command = [sys.executable, __file__, "--compile"]
    processes = [
        subprocess.Popen([*command, "--formats", form, "--only", kind.name]) for form, kind in work(formats, only)
    ]
    for process in processes:
        process.wait()


def compile_programs(form: str, kind: Kind) -> None:
    """Run every variant of every batch once."""
    batches, layer = batches_of(form, kind)
    for batch in batches.values():
        for variant in (NOW, *VARIANTS):
            batch.run(layer, variant)
    torch.cuda.synchronize()


def batches_of(form: str, kind: Kind) -> tuple[dict[tuple[int, int], Batch], Layer]:
    """Every batch, and a layer with pages for each of them."""
    batches = {shape: Batch(kind, *shape) for shape in BATCHES}
    return batches, Layer.of(kind, form, max(batch.num_pages for batch in batches.values()))


def measure(form: str, kind: Kind) -> Iterator[tuple[dict[str, object], list[str]]]:
    """Times of every batch, and the variants that gave other bits."""
    batches, first = batches_of(form, kind)
    layers = [first, *(first.copy() for _ in range(max(3, min(11, 3 * CACHE_BYTES // first.weight_bytes))))]
    for shape, batch in batches.items():
        found, differ = times(batch, layers, VARIANTS)
        changes = " ".join(f"{found[variant.name] - found['now']:+.1f}" for variant in VARIANTS)
        print(f"{form} {kind.name} {shape[0]} x {shape[1]}: {found['now']:.1f}; {changes}", flush=True)
        if differ:
            print(f"FAULT {form} {kind.name} {shape[0]} x {shape[1]}: other bits of {differ}", flush=True)
        yield {"format": form, "layer": kind.name, "batch": shape, "us": found}, differ


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="bf16,int4,nvfp4,fp8")
    parser.add_argument("--only", default="", help="kinds of layers whose name contains this")
    parser.add_argument("--out", type=Path, help="a file for all numbers")
    parser.add_argument("--compile", action="store_true", help="compile the programs and end")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    formats = arguments.formats.split(",")
    if arguments.compile:
        for form, kind in work(formats, arguments.only):
            compile_programs(form, kind)
        return
    started = time.monotonic()
    compile_all(formats, arguments.only)
    print(f"-- compiled: {time.monotonic() - started:.0f} s", flush=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    print("us a layer now; more or less with " + ", ".join(variant.name for variant in VARIANTS), flush=True)
    results: list[dict[str, object]] = []
    faults = 0
    for form, kind in work(formats, arguments.only):
        for result, differ in measure(form, kind):
            results.append(result)
            faults += len(differ)
        torch.cuda.empty_cache()
        if arguments.out:
            arguments.out.write_text(json.dumps(results))
    print(f"-- {time.monotonic() - started:.0f} s, {faults} faults", flush=True)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
