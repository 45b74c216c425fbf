"""Times every kernel at the shapes of the published models, beside the time that its bytes alone would take.

    PYTHONPATH=kernels:workers python benchmarks/kernels.py [--out benchmarks/results/FILE.md]

A row is the median of replays of a CUDA graph that holds the kernel several times, each over its own inputs, so that
neither launch gaps nor the cache make it faster or slower than it is in a step. Bytes count each input read once and
each output written once (of experts, the weights that some row chose); the floor divides them by the bandwidth of a
large copy, measured first. "eager" is how long the host is busy with one call outside a graph.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from decode_kernels.measure import CACHE_BYTES, DEVICE, median_us, random
from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.table import REFERENCE, Kernels, triton_kernels
from gemray_kernels.triton.paged_attention import paged_attention

PAGE_SIZE = 16
REPLAYS = 15


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kernel: str
    shape: str
    bytes: int
    calls: list[Callable[[], object]]
    """The same work over different inputs."""


def copies_for(num_bytes: int) -> int:
    """How many input sets exceed the cache together."""
    return max(2, min(24, 3 * CACHE_BYTES // max(num_bytes, 1)))


def attention(
    name: str, heads: int, kv_heads: int, head_dim: int, window: int | None, batch: int, rows: int, context: int
) -> Row:
    """`batch` sequences of `rows` rows that end `context` keys."""
    seen = context if window is None else min(context, window + rows - 1)
    read = batch * seen * kv_heads * head_dim * 2 * 2
    moved = read + 2 * batch * rows * heads * head_dim * 2
    pages_each = -(-context // PAGE_SIZE)
    calls: list[Callable[[], object]] = []
    for _ in range(copies_for(read)):
        k_pages, v_pages = (random(1 + batch * pages_each, PAGE_SIZE, kv_heads, head_dim) for _ in range(2))
        q_TND = random(batch * rows, heads, head_dim, gain=1.5 / head_dim**0.5)
        table_SP = (torch.randperm(batch * pages_each, device=DEVICE) + 1).int().view(batch, pages_each)
        start_Z = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * rows
        kv_len_S = torch.full((batch,), context, device=DEVICE, dtype=torch.int32)

        def call(
            arguments: tuple[Tensor, ...] = (q_TND, k_pages, v_pages, table_SP, start_Z, kv_len_S),
        ) -> Tensor:
            return paged_attention(*arguments, window=window, causal=True, scale=1.0)

        calls.append(call)
    return Row(f"attention, {name}", f"{batch} x {rows} rows, {context} keys", moved, calls)


def experts(kernels: Kernels, label: str, rows: int) -> Row:
    """26B-A4B's: 128 experts of width 704, 8 a row, hidden size 2816."""
    gate_up, down = random(128, 1408, 2816, gain=0.02), random(128, 2816, 704, gain=0.04)
    calls: list[Callable[[], object]] = []
    touched = []
    for _ in range(8):
        x_TH = random(rows, 2816)
        weights, numbers = REFERENCE.route(random(1, rows, 128, dtype=torch.float32), random(128), 8)
        touched.append(len(numbers.unique()))
        calls.append(lambda x=x_TH, w=weights, n=numbers: kernels.gated_experts(x, w, n, gate_up, down))
    used = statistics.mean(touched)
    return Row(f"experts, {label}", f"{rows} rows, {used:.0f} experts", int(used * 3 * 704 * 2816 * 2), calls)


def small_kernels(kernels: Kernels, label: str, rows: int) -> Iterator[Row]:
    """31B: hidden size 5376, 32 query and 16 KV heads of 256."""
    heads, kv_heads, head_dim, hidden = 32, 16, 256, 5376
    pages = [random(64 + rows // PAGE_SIZE, PAGE_SIZE, kv_heads, head_dim) for _ in range(2)]
    places = torch.randperm(64 * PAGE_SIZE, device=DEVICE)[:rows]
    norm, head_norm, scale = Norm(random(hidden), 1e-6), Norm(random(head_dim), 1e-6), random(1)
    write = KVWrite(head_norm, True, *pages, places)
    sets = []
    for _ in range(8):
        qkv = random(1, rows, (heads + 2 * kv_heads) * head_dim)
        angle = torch.rand(rows, 1, head_dim, device=DEVICE) * 6
        sets.append(
            (random(rows, hidden), random(1, rows, hidden), qkv, angle.cos().bfloat16(), angle.sin().bfloat16())
        )
    row, head = rows * hidden * 2, rows * head_dim * 2
    runs: list[tuple[str, int, Callable[..., object]]] = [
        ("rms_norm", 2 * row, lambda x, *_: kernels.rms_norm(x, norm.weight_D, 1e-6)),
        ("add_then_norms", 4 * row, lambda x, parts, *_: kernels.add_then_norms(x, parts, norm, scale, [norm])),
        (
            "attention_inputs",
            2 * (heads + 2 * kv_heads) * head,
            lambda x, parts, qkv, cos, sin: kernels.attention_inputs(qkv, cos, sin, heads, head_norm, write),
        ),
    ]
    for name, moved, run in runs:
        calls = [lambda run=run, s=s: run(*s) for s in sets]
        yield Row(f"{name}, {label}", f"{rows} rows", moved, calls)


def rows_of_table() -> Iterator[Row]:
    """Everything that is measured, made one after the other: inputs are large."""
    groups = {
        "31B sliding": (32, 16, 256, 1024),
        "31B full": (32, 4, 512, None),
        "26B-A4B full": (16, 2, 512, None),
        "E4B sliding": (8, 2, 256, 512),
    }
    steps = [(1, 1, 640), (1, 5, 640), (1, 16, 640), (8, 1, 640), (8, 5, 640), (8, 16, 640), (32, 5, 640)]
    for name, group in groups.items():
        for batch, rows, context in [*steps, (1, 1, 16384), (8, 5, 16384), (1, 512, 512), (1, 512, 8192)]:
            yield attention(name, *group, batch, rows, context)
    for rows in (1, 5, 8, 40, 160, 512):
        for label, kernels in (("triton", triton_kernels()), ("torch", REFERENCE)):
            yield experts(kernels, label, rows)
    for rows in (1, 40, 512):
        for label, kernels in (("triton", triton_kernels()), ("torch", REFERENCE)):
            yield from small_kernels(kernels, label, rows)


def copy_bandwidth() -> float:
    """Bytes a second of a large device-to-device copy, read and written bytes counted."""
    source = random(1 << 29)
    target = torch.empty_like(source)
    return 2e6 * source.nbytes / median_us([lambda: target.copy_(source)], REPLAYS)


def host_seconds(call: Callable[[], object]) -> float:
    """Host time of one call outside a graph."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        call()
    elapsed = (time.perf_counter() - begin) / 20
    torch.cuda.synchronize()
    return elapsed


def main() -> None:
    """Print the table; write it where --out says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    lines = [
        "# Kernels",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bfloat16, "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}; a large copy moves {bandwidth / 1e12:.2f} TB/s.",
        "Made by `benchmarks/kernels.py`, which says what the columns are.",
        "",
        "| kernel | shape | us | GB/s | floor us | eager us |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows_of_table():
        if arguments.only not in row.kernel:
            continue
        try:
            seconds = f"{median_us(row.calls, REPLAYS):.1f}"
            rate = f"{row.bytes / float(seconds) / 1e3:.0f}"
        except RuntimeError as error:  # some references read numbers on the host, which no graph can hold
            seconds, rate = f"no graph: {str(error).splitlines()[0][:40]}", ""
            torch.cuda.synchronize()
        eager = host_seconds(row.calls[0]) * 1e6
        lines.append(
            f"| {row.kernel} | {row.shape} | {seconds} | {rate} | {row.bytes / bandwidth * 1e6:.1f} | {eager:.0f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    table = "\n".join(lines) + "\n"
    print(table)
    if arguments.out is not None:
        arguments.out.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
