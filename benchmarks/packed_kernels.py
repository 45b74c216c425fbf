"""Times products with packed weights, beside the time of their bytes alone and beside bfloat16 products.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python benchmarks/packed_kernels.py --out results.json \
        [--formats "int4 group 32,fp8 channel"] [--parts decode,prompts]

Medians of replays of a CUDA graph over copies that exceed the cache together, for the layers of 31B; share is the time
of the packed bytes at the rate of a sum over 2 GiB over the time taken. Every tile's product is checked first. Programs
are compiled in several processes. At the end of a format a layer's products run one after the other between the norms
that lie there, as a decoding step has them.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from decode_kernels.measure import CACHE_BYTES, median_us, random
from decode_kernels.weights import WEIGHTS, Weight
from gemray_kernels.packed_tiles import TiledWeight, laid_out
from gemray_kernels.reference.activation import gelu_tanh_and_mul
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.reference.packed_linear import dequantized
from gemray_kernels.triton.layer_norms import add_then_norms
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.packed_dequantize import dequantized as written_down
from gemray_kernels.triton.packed_linear import PackedTile, packed_gated_linear_in_tiles, packed_linear_in_tiles
from gemray_kernels.triton.packed_prompts import PromptTile, packed_prompt_linear
from support.kernels.packed_cases import FORMATS, PackedFormat, copied, random_packed

LAYER = ("qkv sliding", "o sliding", "gate_up", "down")
TOLERANCE = 2.5e-3
PROCESSES = 14
ROWS = (1, 8, 16, 32, 64)
FEW_ROWS = 16
DEPTHS = (0, 2, 8)
"""Units that are asked for before the start."""


def first(*values: int, units: int = 1) -> PackedTile:
    """A tile whose left operand is the weight: outputs, warps, stages."""
    return PackedTile(*values, units=units, weight_first=True)


@dataclass(frozen=True)
class Tiles:
    """Tiles that are tried for one code."""

    few: Sequence[PackedTile]
    """For at most `FEW_ROWS` rows, each with the splits that make about two and four programs a multiprocessor."""
    gated: Sequence[PackedTile]
    more: Sequence[PackedTile]
    """For more rows, with the splits of the best for few: the order of sums has to be the same."""
    gated_more: Sequence[PackedTile]


TILES: Mapping[str, Tiles] = {
    "int4": Tiles(
        few=[
            PackedTile(64, 2, 4),
            first(128, 2, 3, units=2),
            first(128, 2, 4),
            first(128, 2, 5),
            first(128, 2, 4, units=2),
            first(128, 4, 4),
            first(64, 2, 4),
            first(64, 2, 6),
            first(64, 1, 4),
            first(64, 1, 4, units=2),
        ],
        gated=[
            PackedTile(32, 2, 3, units=2),
            first(32, 2, 3, units=2),
            first(32, 2, 4),
            first(32, 2, 5),
            first(32, 1, 4),
            first(16, 1, 3, units=2),
            first(16, 1, 4),
            first(16, 1, 5),
            first(16, 1, 3, units=3),
            first(64, 4, 3, units=2),
        ],
        more=[PackedTile(128, 4, 4), PackedTile(64, 2, 4), first(128, 4, 4)],
        gated_more=[PackedTile(64, 4, 4), PackedTile(32, 2, 4), first(32, 4, 4)],
    ),
    "nvfp4": Tiles(
        few=[
            PackedTile(64, 2, 3, units=2),
            first(64, 2, 3, units=2),
            first(64, 2, 4, units=2),
            first(64, 2, 3, units=4),
            first(128, 2, 3, units=2),
            first(128, 2, 4, units=2),
            first(128, 2, 3, units=4),
            first(128, 4, 3, units=4),
            first(64, 1, 3, units=4),
        ],
        gated=[
            PackedTile(64, 4, 3, units=2),
            first(32, 2, 3, units=2),
            first(32, 2, 4, units=2),
            first(32, 2, 3, units=4),
            first(32, 1, 3, units=4),
            first(16, 1, 3, units=2),
            first(16, 1, 3, units=4),
            first(16, 1, 4, units=4),
            first(64, 2, 3, units=2),
            first(64, 4, 3, units=4),
        ],
        more=[PackedTile(128, 4, 4, units=2), PackedTile(64, 2, 3, units=2), first(128, 4, 4, units=2)],
        gated_more=[PackedTile(64, 4, 3, units=2), PackedTile(32, 2, 3, units=2)],
    ),
    "fp8": Tiles(
        few=[
            PackedTile(64, 4, 4),
            first(64, 4, 5),
            first(64, 2, 4),
            first(128, 2, 4),
            first(128, 4, 4),
            first(64, 1, 4),
        ],
        gated=[PackedTile(64, 4, 4), first(32, 2, 4), first(32, 2, 5), first(16, 1, 4), first(32, 1, 4)],
        more=[first(128, 4, 4)],
        gated_more=[PackedTile(64, 4, 4)],
    ),
}
PROMPT_ROWS = 512


PROMPTS = [
    PromptTile(256, 128, 8, 3),
    PromptTile(256, 128, 8, 4),
    PromptTile(128, 256, 8, 3),
    PromptTile(128, 256, 8, 2),
    PromptTile(64, 128, 4, 3),
    PromptTile(64, 128, 4, 2),
    PromptTile(64, 256, 4, 2),
    PromptTile(128, 128, 8, 2),
    PromptTile(128, 128, 8, 2, most_registers=128),
    PromptTile(128, 128, 4, 2),
]


def product(weight: Weight, x: Tensor, w: TiledWeight, tile: PackedTile | PromptTile) -> Tensor:
    """The product as the tile's kernel gives it: summands where it splits."""
    dtype = x.dtype if tile.splits == 1 else torch.float32
    if isinstance(tile, PromptTile):
        return packed_prompt_linear(x, w, tile, out_dtype=dtype)
    if weight.kind == "gelu":
        return packed_gated_linear_in_tiles(x, w, tile, Gate.GELU)
    return packed_linear_in_tiles(x, w, tile, out_dtype=dtype)


def short(tile: PackedTile | PromptTile) -> str:
    """A tile in a table's cell."""
    held = f"{tile.outputs} w{tile.num_warps} s{tile.num_stages}"
    if isinstance(tile, PromptTile):
        return f"{held} r{tile.rows} {tile.most_registers or ''}/{tile.splits}"
    return f"{'W' if tile.weight_first else 'x'}{held} u{tile.units} p{tile.prefetched} /{tile.splits}"


def tiles(form: PackedFormat, weight: Weight) -> Iterator[PackedTile]:
    """Tiles to try for few rows, each with some splits."""
    tried = TILES[form.code.name]
    if weight.kind == "gelu":
        yield from (replace(tile, prefetched=depth) for tile in tried.gated for depth in (0, 4))
        return
    for tile in tried.few:
        programs = -(-weight.num_out // tile.outputs)
        for split in sorted({round(count * MULTIPROCESSORS / programs) for count in (2, 3, 4)}):
            if 1 <= split <= 16 and weight.num_in // split >= 512:
                yield from (replace(tile, splits=split, prefetched=depth) for depth in (0, 4))


def read_rate() -> float:
    """Bytes a second of a sum over 2 GiB."""
    data = random(1 << 30)
    return data.nbytes / median_us([data.sum]) * 1e6


def copies(form: PackedFormat, weight: Weight) -> tuple[list[TiledWeight], int]:
    """As many copies of a weight as exceed the cache, and the bytes of each."""
    whole = random_packed(form, weight.num_out, weight.num_in, device="cuda")
    assert whole.tiling is not None
    laid = laid_out(whole, whole.tiling)
    num_bytes = laid.words_BOC.nbytes + (0 if laid.scale_BO is laid.factor_O else laid.scale_BO.nbytes)
    others = range(max(2, 3 * CACHE_BYTES // num_bytes + 1) - 1)
    return [
        laid,
        *(replace(laid, words_BOC=laid.words_BOC.clone(), scale_BO=laid.scale_BO.clone()) for _ in others),
    ], num_bytes


def times(weight: Weight, x: Tensor, sets: Sequence[TiledWeight], tile: PackedTile | PromptTile) -> float:
    """Microseconds of one product; infinite for a tile that does not run."""
    try:
        return median_us([partial(product, weight, x, w, tile) for w in sets])
    except Exception as reason:
        print("refused", short(tile), str(reason)[:100], flush=True)
        return float("inf")


@dataclass(frozen=True)
class Job:
    """A program to compile: that of a tile for so many rows."""

    form: str
    kind: str
    tile: PackedTile | PromptTile
    rows: int

    def run(self, weight: TiledWeight) -> Tensor:
        """The product of random rows with a small weight."""
        return product(small_shape(self.kind), random(self.rows, weight.num_in), weight, self.tile)


def small_shape(kind: str) -> Weight:
    """The weight on which tiles are compiled and checked."""
    return Weight("small", kind, 1024, 2304, kind)


def small(form: PackedFormat) -> tuple[TiledWeight, Tensor]:
    """That weight, and its numbers in float64."""
    weight = random_packed(form, 1024, 2304, device="cuda")
    assert weight.tiling is not None
    wide_OI = dequantized(copied(weight), torch.float64)
    return laid_out(weight, weight.tiling), wide_OI


def compile_all(jobs: Sequence[Job]) -> None:
    """Compile programs in several processes, so that they lie in the cache on disk."""
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        Path(file.name).write_bytes(pickle.dumps(list(jobs)))
        command = [sys.executable, __file__, "--jobs", file.name, "--share"]
        for process in [subprocess.Popen([*command, str(number)]) for number in range(PROCESSES)]:
            process.wait()


def compile_share(jobs: Sequence[Job]) -> None:
    """Run every job once, refused ones too."""
    weights = {form: small(FORMATS[form])[0] for form in {job.form for job in jobs}}
    for job in jobs:
        try:
            job.run(weights[job.form])
        except Exception as reason:
            print("refused", job.kind, short(job.tile), job.rows, str(reason)[:100], flush=True)


def first_jobs(form: PackedFormat, parts: Sequence[str]) -> list[Job]:
    """All tiles at the rows that they are for, with a split and without."""
    tried = TILES[form.code.name]
    jobs: list[Job] = []
    if "decode" in parts:
        for depth in (0, 4):
            few = [replace(tile, splits=2, prefetched=depth) for tile in tried.few]
            gated = [replace(tile, prefetched=depth) for tile in tried.gated]
            jobs += [Job(form.name, "summands", tile, 8) for tile in few]
            jobs += [Job(form.name, "gelu", tile, 8) for tile in gated]
        jobs += [Job(form.name, "summands", replace(tile, splits=2), rows) for tile in tried.more for rows in (32, 64)]
        jobs += [Job(form.name, "gelu", tile, rows) for tile in tried.gated_more for rows in (32, 64)]
    if "prompts" in parts:
        jobs += [Job(form.name, "summands", tile, PROMPT_ROWS) for tile in PROMPTS]
    return jobs


def check(form: PackedFormat, parts: Sequence[str]) -> None:
    """Compare every tile's product, and a row's bits over all tiles that cut sums at the same places."""
    weight, wide_OI = small(form)
    x = random(PROMPT_ROWS, weight.num_in)
    bits: dict[tuple[str, int], tuple[PackedTile, Tensor]] = {}
    for job in first_jobs(form, parts):
        try:
            found = product(small_shape(job.kind), x[: job.rows], weight, job.tile)
        except Exception as reason:
            print("refused", job.kind, short(job.tile), str(reason)[:100], flush=True)
            continue
        expected = x[: job.rows].double() @ wide_OI.T
        if job.kind == "gelu":
            expected = gelu_tanh_and_mul(expected)
        else:
            found = found.sum(0)
        error = float((found.double() - expected).norm() / expected.norm())
        if not error < 2 * TOLERANCE:
            print("FAULT", form.name, job.kind, short(job.tile), f"at {job.rows} rows: error {error:.1e}", flush=True)
        if isinstance(job.tile, PackedTile):
            units = job.tile.units if job.tile.splits > 1 else 0
            other, row = bits.setdefault((job.kind, units), (job.tile, found[0]))
            if not torch.equal(row, found[0]):
                print("FAULT", form.name, job.kind, short(job.tile), "differs in bits from", short(other), flush=True)


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
            Job(name, kind, replace(best, prefetched=depth), 8) for depth in DEPTHS
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

        def one(number: int, depth: int, residual: Tensor = residual, heads: Tensor = heads, norm: Norm = norm) -> None:
            def of(case: Case, x: Tensor) -> Tensor:
                tile = replace(case.best(1)[0], prefetched=depth)
                return product(case.weight, x, case.sets[number % len(case.sets)], tile)

            def normed(summands: Tensor) -> Tensor:
                return add_then_norms(residual, summands, norm, None, [norm])[1]

            of(qkv, residual)
            hidden = normed(of(o, heads))
            normed(of(down, of(gate_up, hidden)))

        for depth in (*DEPTHS, 4):
            result[f"{rows} rows, p{depth}"] = median_us([partial(one, number, depth) for number in range(6)])
    cells = ", ".join(f"{name}: {us:.1f}" for name, us in result.items())
    print(f"\n{cases[0].form.name} layer, floor {floor:.1f} us: {cells}", flush=True)
    return {"format": cases[0].form.name, "layer us": result, "floor us": floor}


def prompts(form: PackedFormat, weight: Weight) -> dict[str, object]:
    """Microseconds of a prompt's product in bfloat16, with numbers that are written down first, and in tiles."""
    sets = copies(form, weight)[0][:2]
    plain = [random(weight.num_out, weight.num_in, gain=weight.num_in**-0.5) for _ in range(2)]
    x = random(PROMPT_ROWS, weight.num_in)
    result = {
        "bfloat16": median_us([partial(torch.nn.functional.linear, x, w) for w in plain]),
        "written down": median_us([lambda w=w: torch.nn.functional.linear(x, written_down(w)) for w in sets]),  # type: ignore[misc]
        "written down alone": median_us([partial(written_down, w) for w in sets]),
    }
    for tile in PROMPTS:
        for splits in (1, 2, 3) if weight.num_out < 8192 else (1,):
            cut = replace(tile, splits=splits)
            result[short(cut)] = times(weight, x, sets, cut)
    cells = ", ".join(f"{name} {us:.0f}" for name, us in result.items())
    print(f"{form.name} {weight.name}, {PROMPT_ROWS} rows: {cells}", flush=True)
    return {"format": form.name, "weight": asdict(weight), "prompt us": result}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int4 group 32,nvfp4,fp8 channel")
    parser.add_argument("--parts", default="decode,prompts")
    parser.add_argument("--out", type=Path, help="a file for all numbers")
    parser.add_argument("--jobs", type=Path, help="compile the programs of this file and end")
    parser.add_argument("--share", type=int, default=0, help="which part of them")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.jobs is not None:
        compile_share(pickle.loads(arguments.jobs.read_bytes())[arguments.share :: PROCESSES])
        return
    forms, parts = [FORMATS[name] for name in arguments.formats.split(",")], arguments.parts.split(",")
    started = time.monotonic()

    def say(what: str) -> None:
        print(f"-- {what}: {time.monotonic() - started:.0f} s", flush=True)

    compile_all([job for form in forms for job in first_jobs(form, parts)])
    rate = read_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; reads "
        f"{rate / 1e12:.2f} TB/s",
        flush=True,
    )
    say("compiled")
    weights = [weight for weight in WEIGHTS if weight.model == "31B" and weight.name in LAYER]
    results: list[dict[str, object]] = []
    cases: dict[str, list[Case]] = {}
    for form in forms:
        check(form, parts)
        if "decode" in parts:
            cases[form.name] = [sweep(form, weight, rate) for weight in weights]
        say(f"swept {form.name}")
    compile_all([job for of_form in cases.values() for case in of_form for job in case.jobs()])
    say("compiled")
    for form in forms:
        results += [case.more(rate) for case in cases.get(form.name, ())]
        results += [layer(cases[form.name], rate)] if form.name in cases else []
        cases.pop(form.name, None)  # and their memory
        if "prompts" in parts:
            results += [prompts(form, weight) for weight in weights if weight.name != "o sliding"]
        say(form.name)
        if arguments.out:
            arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
