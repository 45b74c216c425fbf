"""Times products with packed weights, beside the time of their bytes alone and beside bfloat16 products.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python benchmarks/packed_kernels.py \
        [--formats "int4 group 32,fp8 channel"] [--only 31B] [--parts decode,prompts]

Medians of replays of a CUDA graph over copies that exceed the cache together. "share" is the floor over the time: the
floor is the packed bytes over the read rate of a sum over 2 GiB. Programs are compiled in several processes first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from decode_kernels.measure import CACHE_BYTES, median_us, random
from decode_kernels.weights import WEIGHTS, Weight
from gemray_kernels.packed_tiles import TiledWeight, laid_out
from gemray_kernels.triton.activation import gelu_tanh_and_mul
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_dequantize import dequantized
from gemray_kernels.triton.packed_linear import PackedTile, packed_gated_linear_in_tiles, packed_linear_in_tiles
from support.kernels.packed_cases import FORMATS, PackedFormat, random_packed

ROWS = (1, 8, 16, 32, 64)
DECODE = [
    PackedTile(128, 4, 4),
    PackedTile(128, 4, 3, units=2),
    PackedTile(64, 2, 4),
    PackedTile(64, 2, 3, units=2),
    PackedTile(64, 4, 4, units=2),
    PackedTile(64, 4, 5, weight_first=True),
    PackedTile(64, 2, 4, weight_first=True),
    PackedTile(64, 2, 3, units=2, weight_first=True),
    PackedTile(128, 2, 4, weight_first=True),
    PackedTile(32, 1, 4, units=2, weight_first=True),
]
GATED = [
    PackedTile(64, 4, 4),
    PackedTile(64, 4, 3, units=2),
    PackedTile(32, 4, 4),
    PackedTile(32, 2, 4),
    PackedTile(32, 2, 3, units=2),
    PackedTile(32, 2, 4, weight_first=True),
    PackedTile(32, 2, 3, units=2, weight_first=True),
    PackedTile(64, 2, 3, weight_first=True),
    PackedTile(16, 1, 4, units=2, weight_first=True),
]
HALF_UNITS = [
    PackedTile(128, 4, 3, units=4),
    PackedTile(64, 4, 3, units=4),
    PackedTile(64, 2, 3, units=4, weight_first=True),
    PackedTile(128, 2, 3, units=2, weight_first=True),
]
"""Tiles that are tried where units have 64 inputs."""
PROMPTS = [
    PackedTile(128, 8, 3, weight_first=True, rows=256),
    PackedTile(128, 8, 4, weight_first=True, rows=128),
]
PROMPT_ROWS = (128, 512, 2048)
PROCESSES = 8


def wider(tile: PackedTile) -> PackedTile:
    """A tile of the same sums whose programs read the rows half as often."""
    return replace(tile, outputs=2 * tile.outputs, num_warps=2 * tile.num_warps)


def decode_tiles(form: PackedFormat, weight: Weight) -> Iterator[PackedTile]:
    """Tiles to try, each with the splits that make one to three programs a multiprocessor."""
    if weight.kind == "gelu":
        yield from GATED
        if form.code.name == "nvfp4":
            yield from (tile for tile in HALF_UNITS if tile.outputs == 64)
        return
    for tile in [*DECODE, *(HALF_UNITS if form.code.name == "nvfp4" else ())]:
        programs = -(-weight.num_out // tile.outputs)
        splits = {1} | {round(target / programs) for target in (132, 264, 396, 528)}
        for split in sorted(splits):
            if 1 <= split <= 16 and weight.num_in // split >= 512 and programs * split <= 1100:
                yield replace(tile, splits=split)


def product(weight: Weight, x: Tensor, w: TiledWeight, tile: PackedTile) -> Tensor:
    """The product as the tile's kernel gives it: summands where it splits."""
    if weight.kind == "gelu":
        return packed_gated_linear_in_tiles(x, w, tile, Gate.GELU)
    return packed_linear_in_tiles(x, w, tile, out_dtype=x.dtype if tile.splits == 1 else torch.float32)


def short(tile: PackedTile) -> str:
    """A tile in a table's cell."""
    order = "W" if tile.weight_first else "x"
    return f"{order} {tile.outputs} w{tile.num_warps} s{tile.num_stages} u{tile.units} /{tile.splits}"


def read_rate() -> float:
    """Bytes a second of a sum over 2 GiB."""
    data = random(1 << 30)
    return data.nbytes / median_us([data.sum]) * 1e6


def copies(form: PackedFormat, weight: Weight) -> tuple[list[TiledWeight], int]:
    """As many copies of a weight as exceed the cache, and the bytes of each."""
    first = random_packed(form, weight.num_out, weight.num_in, device="cuda")
    assert first.tiling is not None
    laid = laid_out(first, first.tiling)
    num_bytes = laid.words_BOC.nbytes + (0 if laid.scale_BO is laid.factor_O else laid.scale_BO.nbytes)
    others = range(max(2, 3 * CACHE_BYTES // num_bytes + 1) - 1)
    return [
        laid,
        *(replace(laid, words_BOC=laid.words_BOC.clone(), scale_BO=laid.scale_BO.clone()) for _ in others),
    ], num_bytes


def times(weight: Weight, x: Tensor, sets: Sequence[TiledWeight], tile: PackedTile) -> float:
    """Microseconds of one product; infinite for a tile that does not run."""
    try:
        return median_us([partial(product, weight, x, w, tile) for w in sets])
    except Exception as reason:
        print("refused", short(tile), str(reason)[:100], flush=True)
        return float("inf")


def decode(form: PackedFormat, weights: Sequence[Weight], rate: float, rows_of_file: list[dict[str, object]]) -> None:
    """The table of few rows."""
    print("| format | weight | MB | floor us | us (share) at 1 / 8 / 16 / 32 / 64 rows | tile | others at 1 row |")
    for weight in weights:
        sets, num_bytes = copies(form, weight)
        floor = num_bytes / rate * 1e6
        xs = {rows: random(rows, weight.num_in) for rows in ROWS}
        found = {tile: times(weight, xs[1], sets, tile) for tile in decode_tiles(form, weight)}
        best = sorted(found, key=lambda tile: found[tile])
        eight = {tile: times(weight, xs[8], sets, tile) for tile in best[:4]}
        chosen = min(eight, key=lambda tile: eight[tile] + found[tile])
        all_rows = [times(weight, xs[rows], sets, chosen) for rows in ROWS]
        numbers = " / ".join(f"{us:.1f} ({floor / us:.2f})" for us in all_rows)
        wide = [times(weight, xs[rows], sets, wider(chosen)) for rows in (16, 32, 64)]
        numbers += "; wider at 16 / 32 / 64: " + " / ".join(f"{us:.1f}" for us in wide)
        others = ", ".join(f"{short(tile)}: {found[tile]:.1f}" for tile in best[:10])
        print(
            f"| {form.name} | {weight.model} {weight.name} | {num_bytes / 1e6:.1f} | {floor:.1f} | {numbers} | "
            f"{short(chosen)} | {others} |",
            flush=True,
        )
        rows_of_file.append(
            {
                "format": form.name,
                "weight": asdict(weight),
                "bytes": num_bytes,
                "rate": rate,
                "chosen": asdict(chosen),
                "us": dict(zip(ROWS, all_rows, strict=True)),
                "at 1 row": [{"tile": asdict(tile), "us": us} for tile, us in found.items()],
            }
        )


def prompts(form: PackedFormat, weights: Sequence[Weight]) -> None:
    """The table of many rows."""
    print("| format | weight | rows | bfloat16 us | dequantized, then bfloat16 | tiles |")
    for weight in weights:
        sets, _ = copies(form, weight)
        sets = sets[:2]
        plain = random(weight.num_out, weight.num_in, gain=weight.num_in**-0.5)
        for rows in PROMPT_ROWS:
            x = random(rows, weight.num_in)
            gated = weight.kind == "gelu"

            def whole(x: Tensor, w: Tensor, gated: bool = gated) -> Tensor:
                y = torch.nn.functional.linear(x, w)
                return gelu_tanh_and_mul(y) if gated else y

            def in_two(x: Tensor, w: TiledWeight, whole: Callable[[Tensor, Tensor], Tensor] = whole) -> Tensor:
                return whole(x, dequantized(w))

            def tiled(x: Tensor, w: TiledWeight, tile: PackedTile, gated: bool = gated) -> Tensor:
                y = packed_linear_in_tiles(x, w, tile, out_dtype=x.dtype)[0]
                return gelu_tanh_and_mul(y) if gated else y

            bfloat16 = median_us([partial(whole, x, plain)] * 2)
            two = median_us([partial(in_two, x, w) for w in sets])
            found = {
                short(tile) + f" r{tile.rows}": median_us([partial(tiled, x, w, tile) for w in sets])
                for tile in PROMPTS
            }
            text = ", ".join(f"{name}: {us:.0f}" for name, us in found.items())
            print(
                f"| {form.name} | {weight.model} {weight.name} | {rows} | {bfloat16:.0f} | {two:.0f} | {text} |",
                flush=True,
            )


def compiled_share(forms: Sequence[PackedFormat], parts: Sequence[str], number: int) -> None:
    """Run one of `PROCESSES` parts of all programs once, on a small weight, so that they lie in the cache on disk."""
    jobs: list[tuple[PackedFormat, PackedTile, Gate, int]] = []
    for form in forms:
        for rows in (8,) if "decode" in parts else ():
            jobs += [(form, tile, Gate.NONE, rows) for tile in DECODE] + [
                (form, tile, Gate.GELU, rows) for tile in GATED
            ]
        if "prompts" in parts:
            jobs += [(form, tile, Gate.NONE, 512) for tile in PROMPTS]
    for form, tile, gate, rows in jobs[number::PROCESSES]:
        weight = random_packed(form, 1024, 2048, device="cuda")
        assert weight.tiling is not None
        tiled = laid_out(weight, weight.tiling)
        x = random(rows, 2048)
        try:
            if gate is Gate.NONE:
                packed_linear_in_tiles(x, tiled, tile, out_dtype=torch.bfloat16)
                packed_linear_in_tiles(x, tiled, replace(tile, splits=2), out_dtype=torch.float32)
            else:
                packed_gated_linear_in_tiles(x, tiled, tile, gate)
        except Exception as reason:
            print("refused", short(tile), str(reason)[:100], flush=True)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int4 group 32,nvfp4,fp8 channel")
    parser.add_argument("--only", default="31B ", help="weights whose model and name contain this")
    parser.add_argument("--parts", default="decode,prompts")
    parser.add_argument("--share", type=int, help="compile this part of the programs and end")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    forms, parts = [FORMATS[name] for name in arguments.formats.split(",")], arguments.parts.split(",")
    if arguments.share is not None:
        compiled_share(forms, parts, arguments.share)
        return
    started = time.monotonic()
    with_share = [sys.executable, __file__, "--formats", arguments.formats, "--parts", arguments.parts, "--share"]
    for process in [subprocess.Popen([*with_share, str(number)]) for number in range(PROCESSES)]:
        process.wait()
    rate = read_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; reads "
        f"{rate / 1e12:.2f} TB/s; compiled in {time.monotonic() - started:.0f} s",
        flush=True,
    )
    weights = [w for w in WEIGHTS if arguments.only in f"{w.model} {w.name}" and w.kind in ("summands", "gelu")]
    weights = [w for w in weights if w.model in ("31B", "26B-A4B", "E4B")]
    rows_of_file: list[dict[str, object]] = []
    for form in forms:
        if "decode" in parts:
            decode(form, weights, rate, rows_of_file)
        if "prompts" in parts:
            prompts(form, [w for w in weights if w.name in ("qkv sliding", "gate_up", "down")])
        print(f"-- {form.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if out := os.environ.get("OUT"):
        Path(out, "packed_kernels.json").write_text(json.dumps(rows_of_file))


if __name__ == "__main__":
    main()
