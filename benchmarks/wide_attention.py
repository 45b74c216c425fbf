"""Times attention of decode and verify rows with heads of 512: what is served beside what was, and whole layers.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python -m wide_attention [--out results.json]

Medians of replays of CUDA graphs, over pages that exceed the cache together; batches have a null slot. *Before* is the
kernel that other shapes are served by, *plain* reads all keys, *values* reads those that rotate alone. *Floor* is how
long reading what *values* reads takes at the rate of a sum in the same run. It ends with 1 where results are wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode_kernels.measure import Report, error, median_us, random
from gemray_kernels.reference import paged_attention as reference
from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.keys_of_values import KeysOfValues
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.triton.attention_inputs import attention_inputs
from gemray_kernels.triton.layer_norms import add_then_norms
from gemray_kernels.triton.paged_attention import paged_attention, short_tile
from layer_kernels import KINDS, NOW, Layer

PAGE_SIZE = 16
TABLE_COLUMNS = 2048
HEADS = {"31B": (32, 4), "26B-A4B": (16, 2), "E4B": (8, 2), "E2B": (8, 1)}
STEPS: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("31B", (640,), 1),
    ("31B", (640,), 5),
    ("31B", (640,) * 8, 1),
    ("31B", (640,) * 8, 5),
    ("31B", (640,) * 8, 16),
    ("31B", (8192,), 1),
    ("31B", (8192,), 5),
    ("31B", (8192,), 16),
    ("31B", (8192,) * 8, 1),
    ("31B", (8192,) * 8, 2),
    ("31B", (8192,) * 8, 4),
    ("31B", (8192,) * 8, 5),
    ("31B", (8192,) * 8, 16),
    ("31B", (32768, *(640,) * 7), 1),
    ("31B", (32768, *(640,) * 7), 5),
    ("26B-A4B", (8192,), 1),
    ("26B-A4B", (8192,) * 8, 1),
    ("26B-A4B", (8192,) * 8, 5),
    ("E4B", (8192,), 1),
    ("E4B", (8192,) * 8, 1),
    ("E4B", (8192,) * 8, 5),
    ("E2B", (640,), 1),
    ("E2B", (640,) * 8, 5),
    ("E2B", (8192,) * 8, 5),
)
"""Heads, keys of each sequence, and its rows."""
LAYER_STEPS = ((1, 1, 640), (1, 1, 8192), (8, 1, 640), (8, 1, 8192), (1, 5, 8192), (8, 5, 8192), (1, 16, 8192))
"""Sequences, rows of each and keys, of a whole layer of 31B in int4."""
PAGES_BYTES = 160 << 20
TOLERANCE = 6e-3
PROCESSES = 14


@dataclass(frozen=True)
class Batch:
    """Rows at the end of sequences, their tables, a null slot among them, and pages whose keys follow from values."""

    q_TND: Tensor
    tables: tuple[Tensor, Tensor, Tensor]
    weight_D: Tensor
    rows: int
    kv_heads: int
    num_pages: int

    @classmethod
    def of(cls, name: str, keys: Sequence[int], rows: int) -> Batch:
        """Random rows; pages are shuffled."""
        heads, kv_heads = HEADS[name]
        pages = [-(-n // PAGE_SIZE) for n in keys]
        order = torch.randperm(sum(pages), device="cuda").int() + 1
        table_SP = torch.zeros(len(keys) + 1, TABLE_COLUMNS, dtype=torch.int32, device="cuda")
        for row, found in zip(table_SP, torch.split(order, pages), strict=False):
            row[: len(found)] = found
        start_Z = torch.tensor([*range(0, rows * len(keys) + 1, rows), rows * len(keys)], device="cuda").int()
        kv_len_S = torch.tensor([*keys, 0], device="cuda").int()
        q_TND = random(rows * len(keys), heads, 512, gain=1.5 / 512**0.5)
        weight_D = (1 + 0.2 * torch.randn(512, device="cuda")).bfloat16()
        return cls(q_TND, (table_SP, start_Z, kv_len_S), weight_D, rows, kv_heads, 1 + sum(pages))

    def pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values; the rotated dims of a key are random."""
        v_pages = random(self.num_pages, PAGE_SIZE, self.kv_heads, 512)
        k_pages = v_pages * self.weight_D
        for d in (0, 256):
            k_pages[..., d : d + 64] = random(*v_pages.shape[:3], 64)
        return k_pages, v_pages

    def ways(self) -> dict[str, dict[str, Any]]:
        """Options of each way to attend."""
        num_rows, heads, _ = self.q_TND.shape
        group = heads // self.kv_heads
        tile = short_tile(torch.bfloat16, 512, group * self.rows, group, num_rows)
        return {"before": {"tile": tile}, "plain": {}, "values": {"keys_of_values": KeysOfValues(self.weight_D, 64)}}

    def attend(self, pages: tuple[Tensor, Tensor], options: dict[str, Any]) -> Tensor:
        """One call."""
        return paged_attention(
            self.q_TND, *pages, *self.tables, window=None, causal=True, scale=1.0, most_rows=self.rows, **options
        )


class LayerStep:
    """A layer of 31B with full attention."""

    def __init__(self, sequences: int, rows: int, keys: int) -> None:
        """Random rows at the end of as many keys of each sequence."""
        self._kind = next(kind for kind in KINDS if kind.name == "31B full")
        self._batch = Batch.of("31B", [keys] * sequences, rows)
        table_SP, start_Z, _ = self._batch.tables
        place_T = keys - rows + torch.arange(rows, device="cuda").repeat(sequences)
        page_T = table_SP[:-1].repeat_interleave(rows, 0).gather(1, (place_T // PAGE_SIZE)[:, None])[:, 0]
        self._kv_index_T = page_T.long() * PAGE_SIZE + place_T % PAGE_SIZE
        num_rows = int(start_Z[-1])
        angle_T1D = torch.rand(num_rows, 1, 512, device="cuda") * 6
        angle_T1D[..., 64:256] = angle_T1D[..., 320:] = 0
        self._cos, self._sin = angle_T1D.cos().bfloat16(), angle_T1D.sin().bfloat16()
        self._norm = Norm(random(self._kind.hidden), 1e-6)
        self._head_norm = Norm(self._batch.weight_D * 0.06, 1e-6)
        self._k_norm = Norm(self._batch.weight_D, 1e-6)
        self._x_TH, self._normed_TH = random(num_rows, self._kind.hidden), random(num_rows, self._kind.hidden)
        self.num_pages = self._batch.num_pages
        self.ways: dict[str, dict[str, Any] | None] = {"without": None, **self._batch.ways()}

    def run(self, layer: Layer, options: dict[str, Any] | None) -> Tensor:
        """The stream behind the layer; with None, without attention."""
        qkv_STO = layer.summands("qkv", self._normed_TH, NOW)
        write = KVWrite(self._k_norm, True, layer.k_pages, layer.v_pages, self._kv_index_T)
        q_TND = attention_inputs(qkv_STO, self._cos, self._sin, self._kind.heads, self._head_norm, write)
        batch = Batch(
            q_TND, self._batch.tables, self._batch.weight_D, self._batch.rows, self._kind.kv_heads, self.num_pages
        )
        o_TND = q_TND if options is None else batch.attend((layer.k_pages, layer.v_pages), options)
        rows = len(self._x_TH)
        x_TH, normed_TH = add_then_norms(
            self._x_TH,
            layer.summands("o", o_TND.flatten(1), NOW),
            self._norm,
            None,
            [self._norm],
            lets_at_once=layer.starts_at_once("gate_up", rows),
        )
        down_STH = layer.summands("down", layer.gelu(normed_TH, NOW), NOW)
        lets_at_once = layer.starts_at_once("qkv", rows)
        return add_then_norms(x_TH, down_STH, self._norm, None, [self._norm], lets_at_once=lets_at_once)[0]


def compile_step(step: tuple[str, int, int]) -> None:
    """Run each way of a step once, over few pages."""
    name, sequences, rows = step
    batch = Batch.of(name, [40] * sequences, rows)
    for options in batch.ways().values():
        batch.attend(batch.pages(), options)
    torch.cuda.synchronize()


def compile_layer(step: tuple[int, int, int]) -> None:
    """Run a layer once, over few pages."""
    sequences, rows, _ = step
    layer_step = LayerStep(sequences, rows, 40)
    layer_step.run(Layer.of(layer_step._kind, "int4", layer_step.num_pages), None)
    torch.cuda.synchronize()


def compile_all() -> None:
    """Compile every program, in many processes, so that they lie in the cache on disk."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        steps = dict.fromkeys((name, len(keys), rows) for name, keys, rows in STEPS)
        waiting = [pool.apply_async(compile_step, (step,)) for step in steps]
        waiting += [pool.apply_async(compile_layer, (step,)) for step in LAYER_STEPS if step[2] == 8192]
        for task in waiting:
            task.get()


def attention(report: Report, rate: float) -> Iterator[str]:
    """Times of attention alone; what is wrong comes out."""
    print("| layer | sequences x rows | keys | before | plain | values | floor |\n|" + " --- |" * 7, flush=True)
    for name, keys, rows in STEPS:
        batch = Batch.of(name, keys, rows)
        page_bytes = 2 * PAGE_SIZE * batch.kv_heads * 512 * 2
        copies = max(1, min(24, PAGES_BYTES // (page_bytes * batch.num_pages)))
        sets = [batch.pages() for _ in range(copies)]
        expected = None
        if sum(keys) < 20000:
            q_TND, k_pages, v_pages = (x.double() for x in (batch.q_TND, *sets[0]))
            expected = reference.paged_attention(
                q_TND, k_pages, v_pages, *batch.tables, window=None, causal=True, scale=1.0
            )
        us: dict[str, float] = {}
        errors: dict[str, float] = {}
        for way, options in batch.ways().items():
            if way == "values" and name.startswith("E"):
                continue  # whose values are a projection of their own
            calls: list[Callable[[], object]] = [partial(batch.attend, pages, options) for pages in sets]
            us[way] = median_us(calls * (2 if copies == 1 else 1))
            if expected is not None:
                errors[way] = error(batch.attend(sets[0], options), expected)
                if not errors[way] < TOLERANCE:
                    yield f"{name} {len(keys)} x {rows}, {keys[0]} keys, {way}: error {errors[way]:.2g}"
        floor = sum(keys) * batch.kv_heads * (1280 if "values" in us else 2048) / rate * 1e6
        times = " | ".join(f"{us[way]:.1f}" if way in us else "" for way in batch.ways())
        step = f"| {name} | {len(keys)} x {rows} | {' '.join(map(str, dict.fromkeys(keys)))} |"
        report.row("attention", f"{step} {times} | {floor:.1f} |", name=name, keys=keys, rows=rows, us=us, error=errors)


def layers(report: Report) -> None:
    """Times of a whole layer."""
    print(
        "| 31B full, int4: sequences x rows | keys | without | before | plain | values |\n|" + " --- |" * 6, flush=True
    )
    for sequences, rows, keys in LAYER_STEPS:
        step = LayerStep(sequences, rows, keys)
        first = Layer.of(step._kind, "int4", step.num_pages)
        copies = [first, *(first.copy() for _ in range(2))]
        us = {}
        for way, options in step.ways.items():
            us[way] = median_us([partial(step.run, layer, options) for layer in copies])
        times = " | ".join(f"{found:.1f}" for found in us.values())
        report.row("layers", f"| {sequences} x {rows} | {keys} | {times} |", batch=(sequences, rows, keys), us=us)
        del first, copies


def main() -> None:
    """Compile in many processes, then measure in this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for all numbers")
    arguments = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    compile_all()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; compiled {time.monotonic() - began:.0f} s")
    summed = random(1 << 29)
    rate = summed.nbytes / median_us([summed.sum] * 3) * 1e6
    print(f"a sum reads {rate / 1e12:.2f} TB/s", flush=True)
    del summed
    report = Report()
    layers(report)
    for fault in attention(report, rate):
        report.fault(fault)
    print(f"{time.monotonic() - began:.0f} s, {len(report.faults)} faults", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"rate": rate, "rows": report.rows}, indent=1), encoding="utf-8")
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
