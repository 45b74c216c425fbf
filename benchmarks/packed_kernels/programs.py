"""Programs of tiles: which there are, compiled in several processes, and checked.

Run as a module it compiles one process's share of a file of them.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from decode_kernels.measure import random
from decode_kernels.weights import Weight
from gemray_kernels.packed_tiles import TiledWeight, laid_out
from gemray_kernels.reference.activation import gelu_tanh_and_mul
from gemray_kernels.reference.packed_linear import dequantized
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_linear import PackedTile, packed_gated_linear_in_tiles, packed_linear_in_tiles
from gemray_kernels.triton.packed_prompts import PromptTile, packed_prompt_linear
from gemray_kernels.triton.packed_tile_choice import PROMPT_TILES
from packed_kernels.tiles import STARTS, TILES, short
from support.kernels.packed_cases import FORMATS, PackedFormat, copied, random_packed

TOLERANCE = 2.5e-3
PROCESSES = 14
PROMPT_ROWS = 512


def product(weight: Weight, x: Tensor, w: TiledWeight, tile: PackedTile | PromptTile) -> Tensor:
    """The product as the tile's kernel gives it: summands where it splits."""
    dtype = x.dtype if tile.splits == 1 else torch.float32
    if isinstance(tile, PromptTile):
        return packed_prompt_linear(x, w, tile, out_dtype=dtype)
    if weight.kind == "gelu":
        return packed_gated_linear_in_tiles(x, w, tile, Gate.GELU)
    return packed_linear_in_tiles(x, w, tile, out_dtype=dtype)


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
        command = [sys.executable, "-m", "packed_kernels.programs", file.name]
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
        for early in STARTS:
            few = [replace(tile, splits=2, early=early) for tile in tried.few]
            gated = [replace(tile, early=early) for tile in tried.gated]
            jobs += [Job(form.name, "summands", tile, 8) for tile in few]
            jobs += [Job(form.name, "gelu", tile, 8) for tile in gated]
        jobs += [Job(form.name, "summands", replace(tile, splits=2), rows) for tile in tried.more for rows in (32, 64)]
        jobs += [Job(form.name, "gelu", tile, rows) for tile in tried.gated_more for rows in (32, 64)]
    if "prompts" in parts:
        jobs += [Job(form.name, "summands", tile, PROMPT_ROWS) for tile in PROMPT_TILES]
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


def main() -> None:
    """Compile the share of the programs in the file that is the first argument; the second one says which."""
    torch.manual_seed(0)
    compile_share(pickle.loads(Path(sys.argv[1]).read_bytes())[int(sys.argv[2]) :: PROCESSES])


if __name__ == "__main__":
    main()
