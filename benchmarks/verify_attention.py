"""Times attention of decode and verify rows behind a window: keys in parts, and whole in one program a KV head.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python -m verify_attention [--out DIRECTORY]

Calls alone beside the time of reading their keys once, and layers of `layer_kernels` with either: medians of replays of
CUDA graphs over pages and weights that exceed the cache together. Programs are compiled in several processes first. A
result that is further from float64 than 5e-3 of its norm ends the run with 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

import layer_kernels
from decode_kernels.measure import CACHE_BYTES, DEVICE, error, median_us, random
from gemray_kernels.reference.paged_attention import paged_attention as reference
from gemray_kernels.triton import whole_attention
from gemray_kernels.triton.paged_attention import paged_attention

BYTES_PER_US = 4.39e6
"""What an H200 reads of weights."""
PROCESSES = 14
NEVER = 1 << 30
LEAST_PROGRAMS = {"parts": NEVER, "whole": 1}
"""Programs from which on keys are whole, by column."""
BATCHES = tuple((seqs, rows) for seqs in (1, 2, 4, 8, 10, 16, 32) for rows in (1, 5, 16))
LAYER_BATCHES = ((2, 1), (2, 5), (2, 16), (4, 1), (4, 5), (4, 16), (8, 1), (8, 5), (32, 1))
"""Up to 64 rows, for which the layers' products are made."""
SLIDING = {kind.name: kind for kind in layer_kernels.KINDS if kind.window is not None} | {
    "31B sliding of two": layer_kernels.Kind("31B sliding of two", 5376, 16, 8, 256, 1024, 10752)
}
BLOCKS = {
    name: layer_kernels.Kind(name, hidden, heads, 8, 128, 2048, 2 * hidden)
    for name, hidden, heads in (("31B DFlash", 5376, 64), ("26B-A4B DFlash", 2816, 32))
}
"""Layers of a drafter whose sequences have 16 rows each."""
LAYERS = (
    ("int4", "31B sliding"),
    ("bf16", "31B sliding"),
    ("int4", "31B sliding of two"),
    ("bf16", "31B sliding of two"),
    ("bf16", "26B-A4B sliding"),
    ("bf16", "E4B sliding"),
    ("bf16", "E2B sliding"),
)


@dataclass(frozen=True)
class Batch:
    """Rows of sequences of about as many keys, and a null slot without any."""

    arguments: tuple[Tensor, ...]
    rows: int
    window: int
    bytes_read: int

    @classmethod
    def of(cls, kind: layer_kernels.Kind, seqs: int, rows: int, keys: int, seed: int) -> Batch:
        """Random numbers in shuffled pages."""
        torch.manual_seed(seed)
        assert kind.window is not None
        kv_lens = [keys - 7 * s % 29 for s in range(seqs)]
        pages = -(-keys // 16)
        shape = (1 + pages * seqs, 16, kind.kv_heads, kind.head_dim)
        table_SP = torch.zeros(seqs + 1, 2048, dtype=torch.int32, device=DEVICE)
        table_SP[:seqs, :pages] = 1 + torch.randperm(pages * seqs, device=DEVICE).view(seqs, pages)
        start_Z = (torch.arange(seqs + 2, dtype=torch.int32, device=DEVICE) * rows).clamp(max=seqs * rows)
        q_TND = random(seqs * rows, kind.heads, kind.head_dim, gain=1.5 / kind.head_dim**0.5)
        kv_len_S = torch.tensor([*kv_lens, 0], dtype=torch.int32, device=DEVICE)
        read = sum(min(keys, kind.window + rows - 1) for keys in kv_lens) * 4 * kind.kv_heads * kind.head_dim
        arguments = (q_TND, random(*shape), random(*shape), table_SP, start_Z, kv_len_S)
        return cls(arguments, rows, kind.window, read)

    def attended(self, way: str) -> Tensor:
        """The result with keys in parts or whole."""
        with mock.patch.object(whole_attention, "LEAST_PROGRAMS", LEAST_PROGRAMS[way]):
            return paged_attention(*self.arguments, window=self.window, causal=True, scale=1.0, most_rows=self.rows)

    def expected(self) -> Tensor:
        """The reference's result in float64."""
        wide: list[Any] = [x.double() if x.is_floating_point() else x for x in self.arguments]
        return reference(*wide, window=self.window, causal=True, scale=1.0)


def calls() -> Iterator[dict[str, Any]]:
    """Microseconds of a call by batch, and how far its result is from float64."""
    print("\n| layer | sequences x rows, keys | reading | parts | whole | error of whole |\n|" + " --- |" * 6)
    shapes = [(kind, *batch, 640) for kind in SLIDING.values() for batch in BATCHES]
    shapes += [
        (kind, seqs, 16, keys) for kind in BLOCKS.values() for seqs in (1, 2, 4, 8, 16, 32) for keys in (640, 2000)
    ]
    sliding = SLIDING["31B sliding"]
    shapes += [(sliding, seqs, rows, keys) for seqs, rows in ((2, 5), (8, 5), (8, 16)) for keys in (128, 2000)]
    for kind, seqs, rows, keys in shapes:
        first = Batch.of(kind, seqs, rows, keys, 0)
        copies = max(4, min(12, -(-5 * CACHE_BYTES // first.bytes_read)))
        batches = [first, *(Batch.of(kind, seqs, rows, keys, seed) for seed in range(1, copies))]
        expected = first.expected()
        errors = {way: error(first.attended(way), expected) for way in LEAST_PROGRAMS}
        us = {way: median_us([partial(batch.attended, way) for batch in batches]) for way in LEAST_PROGRAMS}
        name = f"{seqs} x {rows}, {keys}"
        reading = first.bytes_read / BYTES_PER_US
        columns = [kind.name, name, *(f"{t:.1f}" for t in (reading, *us.values())), f"{errors['whole']:.1e}"]
        print(f"| {' | '.join(columns)} |", flush=True)
        yield {"layer": kind.name, "batch": (seqs, rows, keys), "reading": reading, "us": us, "error": errors}


def layers() -> Iterator[dict[str, Any]]:
    """Microseconds of a layer by batch, with keys in parts, whole, and without attention."""
    print("\n| layer | sequences x rows | parts | whole | no attention |\n|" + " --- |" * 5)
    for form, name in LAYERS:
        kind = SLIDING[name]
        batches = {shape: layer_kernels.Batch(kind, *shape) for shape in LAYER_BATCHES}
        first = layer_kernels.Layer.of(kind, form, max(batch.num_pages for batch in batches.values()))
        count = max(3, min(11, 3 * CACHE_BYTES // first.weight_bytes))
        copies = [first, *(first.copy() for _ in range(count))]
        for (seqs, rows), batch in batches.items():
            ways = {way: (least, "") for way, least in LEAST_PROGRAMS.items()} | {"none": (NEVER, "attention")}
            us = {}
            for way, (least, without) in ways.items():
                variant = layer_kernels.Variant(way, without=without)
                with mock.patch.object(whole_attention, "LEAST_PROGRAMS", least):
                    us[way] = median_us([partial(batch.run, layer, variant) for layer in copies])
            changes = " | ".join(f"{us[way] - us['parts']:+.1f}" for way in ("whole", "none"))
            print(f"| {name}, {form} | {seqs} x {rows} | {us['parts']:.1f} | {changes} |", flush=True)
            yield {"layer": name, "format": form, "batch": (seqs, rows), "us": us}
        del first, copies
        torch.cuda.empty_cache()


def compile_programs(name: str, form: str | None, rows: int) -> None:
    """Run calls or layers of so many rows once."""
    kind = (SLIDING | BLOCKS)[name]
    for seqs in sorted({seqs for seqs, of in BATCHES if of == rows}):
        for least in LEAST_PROGRAMS.values():
            with mock.patch.object(whole_attention, "LEAST_PROGRAMS", least):
                if form is None:
                    Batch.of(kind, seqs, rows, 64, 0).attended("parts" if least == NEVER else "whole")
                elif (seqs, rows) in LAYER_BATCHES:
                    batch = layer_kernels.Batch(kind, seqs, rows)
                    batch.run(layer_kernels.Layer.of(kind, form, batch.num_pages), layer_kernels.NOW)
    torch.cuda.synchronize()


def main() -> None:
    """Measure calls and layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a directory for all numbers")
    parser.add_argument("--only", choices=("calls", "layers"))
    arguments = parser.parse_args()
    began = time.monotonic()
    parts = {"calls": calls, "layers": layers}
    if arguments.only:
        parts = {arguments.only: parts[arguments.only]}
    work = [(name, None, rows) for name in SLIDING for rows in (1, 5, 16)] if "calls" in parts else []
    work += [(name, None, 16) for name in BLOCKS] if "calls" in parts else []
    packed: list[tuple[str, str | None, int]] = [(name, form, rows) for form, name in LAYERS for rows in (1, 5, 16)]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.starmap(compile_programs, [*work, *(packed if "layers" in parts else [])], chunksize=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for part, measure in parts.items():
        rows = found.setdefault(part, [])
        for row in measure():
            rows.append(row)
            if arguments.out:
                (arguments.out / "verify_attention.json").write_text(json.dumps(found), encoding="utf-8")
    faults = sum(not row["error"]["whole"] < 5e-3 for row in found.get("calls", []))
    print(f"{time.monotonic() - began:.0f} s, {faults} faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
