"""Attention alone: programs of prompt chunks beside each other, exact against fast, and whether exact means exact.

    PYTHONPATH=benchmarks:kernels python -m attention_kernels [--only PART] [--out DIRECTORY]

- ``prompts``: one layer's 4,096 rows over 8,192 keys with the kernel that is served, and by each of the two kernels of
  `attend_in_two` with several tiles, in fast and exact arithmetic.
- ``decode``: decode and verify steps inside a CUDA graph, fast and exact.
- ``bits``: rows of a prompt chunk against the same rows one at a time, in blocks, and in other pages: how many numbers
  differ.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import e, log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

PAGE_SIZE = 16
REPEATS = 5
PROCESSES = 12
"""That compile at one time, before anything is measured."""


@dataclass(frozen=True)
class Layer:
    """Heads of one kind of layer."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None


LAYERS = (
    Layer("31B full", 32, 4, 512, None),
    Layer("31B sliding", 32, 16, 256, 1024),
    Layer("26B-A4B full", 16, 2, 512, None),
    Layer("E4B full", 8, 2, 512, None),
    Layer("E2B sliding", 8, 1, 256, 512),
)

WEIGHTS = (
    (128, 64, 8, 4, None),
    (128, 64, 8, 3, 128),
    (128, 32, 8, 5, 128),
    (128, 64, 4, 3, None),
    (256, 64, 16, 3, None),
)
"""(pairs, columns at a time, warps, stages, registers) of the first kernel."""
VALUES = (
    (128, 128, 128, 128, 8, 4, None),
    (128, 128, 128, 64, 8, 5, 128),
    (128, 128, 128, 64, 4, 5, None),
    (128, 128, 64, 64, 8, 5, 128),
    (128, 128, 64, 128, 8, 4, 128),
    (128, 128, 256, 64, 8, 5, None),
    (256, 256, 128, 64, 16, 5, None),
)
"""(pairs of a block, pairs, columns, keys, warps, stages, registers) of the second."""
STEPS = ((1, 1, 600), (1, 5, 600), (1, 16, 600), (8, 5, 600), (32, 1, 600), (1, 1, 8192), (1, 16, 8192))
"""(sequences, rows of each, keys) of decode and verify steps."""
OTHER_TILES = ((16, 32, 4, 2), (16, 64, 8, 2), (16, 64, 8, 1))
"""(pairs, keys, warps, stages) that exact steps are also timed with."""


@dataclass(frozen=True)
class Batch:
    """Rows of sequences and their keys in shuffled pages."""

    arguments: tuple[Tensor, ...]
    layer: Layer

    @classmethod
    def of(cls, layer: Layer, rows: int, keys: int, num_seqs: int = 1, seed: int = 0, gain: float = 1.5) -> Batch:
        """`num_seqs` sequences of equal lengths."""
        torch.manual_seed(seed)
        pages = -(-keys // PAGE_SIZE)
        shape = (1 + pages * num_seqs, PAGE_SIZE, layer.kv_heads, layer.head_dim)
        k_pages, v_pages = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
        q_TND = torch.randn(rows * num_seqs, layer.heads, layer.head_dim, device="cuda") * gain / layer.head_dim**0.5
        table_SP = (torch.randperm(pages * num_seqs, device="cuda") + 1).int().view(num_seqs, pages)
        start_Z = torch.arange(num_seqs + 1, device="cuda").int() * rows
        kv_len_S = torch.full((num_seqs,), keys, dtype=torch.int32, device="cuda")
        return cls((q_TND.bfloat16(), k_pages, v_pages, table_SP, start_Z, kv_len_S), layer)

    def attention(self, kernel: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        """A call of a kernel."""
        keys = int(self.arguments[-1].max())
        return partial(
            kernel, *self.arguments, window=self.layer.window, causal=True, scale=1.0, most_keys=keys, **options
        )

    def cut(self, place: int, size: int, before: int) -> Batch:
        """`size` rows of its only sequence from `place` on; it has `before` keys before its first row."""
        q_TND, k_pages, v_pages, table_SP, _, _ = self.arguments
        start_Z = torch.tensor([0, size], dtype=torch.int32, device="cuda")
        kv_len_S = torch.tensor([before + place + size], dtype=torch.int32, device="cuda")
        return Batch((q_TND[place : place + size], k_pages, v_pages, table_SP, start_Z, kv_len_S), self.layer)

    def in_two(self, tiles: Any, *, exact: bool) -> Callable[[], Tensor]:
        """A call of the two kernels for prompts."""
        from gemray_kernels.triton.exact_attention import GRID
        from gemray_kernels.triton.prompt_attention import attend_prompts

        def call() -> Tensor:
            out_TND = torch.empty_like(self.arguments[0])
            attend_prompts(
                *self.arguments,
                out_TND,
                window=self.layer.window,
                scale_log2=log2(e),
                v_scale=1.0,
                grid=GRID if exact else 0.0,
                restarts=exact,
                tiles=tiles,
                block_seqs=64,
                early=True,
            )
            return out_TND

        return call


def combinations() -> Iterator[tuple[str, Any, bool]]:
    """(which kernel is of interest, tiles, exact): each tile of a kernel once, beside a plain tile of the other."""
    from gemray_kernels.triton.prompt_attention import PromptTiles

    for exact in (True, False):
        for pairs, depth, warps, stages, registers in WEIGHTS if exact else WEIGHTS[:1]:
            yield "weights", PromptTiles(pairs, depth, warps, stages, 128, 128, 64, 8, 5, registers), exact
        for pairs, *rest, registers in VALUES:
            yield "values", PromptTiles(pairs, 64, 8, 4, *rest, None, registers), exact


def tries(layer: Layer) -> list[tuple[str, Any, bool]]:
    """The combinations that a layer's kernels are timed with: all of head dim 512, and what is exact of others."""
    return [t for t in combinations() if layer.head_dim > 256 or (t[2] and t[1].pairs == 128)]


def compile_tiles(layer: Layer, tiles: Any, exact: bool) -> None:
    """Run a combination once, so that its programs are in the cache of all processes."""
    try:
        Batch.of(layer, 4096, 8192).in_two(tiles, exact=exact)()
        torch.cuda.synchronize()
    except Exception as error:  # a sweep may contain tiles that do not fit
        print(f"    {tiles}: {str(error).splitlines()[0][:90]}", flush=True)


def compile_steps(layer: Layer) -> None:
    """Run every step of `decode` once."""
    for _, call in steps(layer):
        try:
            call()
        except Exception as error:
            print(f"    {str(error).splitlines()[0][:90]}", flush=True)
    torch.cuda.synchronize()


def median_ms(call: Callable[[], object]) -> float:
    """Time of a call by events."""
    call()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def by_kernel(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each kernel of a call."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profiler.events() or ():
        span: Any = event
        if event.device_type.name == "CUDA":
            found[event.name] = found.get(event.name, 0.0) + span.device_time / 1e3
    return found


def prompts() -> list[dict[str, Any]]:
    """Time every combination; print the best of each kernel."""
    from gemray_kernels.triton.exact_attention import exact_paged_attention
    from gemray_kernels.triton.paged_attention import long_tile, paged_attention

    found: list[dict[str, Any]] = []
    for layer in LAYERS[:2]:
        batch = Batch.of(layer, 4096, 8192)
        served, exact_call = batch.attention(paged_attention), batch.attention(exact_paged_attention)
        one_kernel = batch.attention(paged_attention, long=long_tile(torch.bfloat16, layer.head_dim, 1))
        expected = one_kernel()
        ms_served, ms_exact, ms_one = (median_ms(call) for call in (served, exact_call, one_kernel))
        print(
            f"\n{layer.name}, 4,096 rows, 8,192 keys: served {ms_served:.3f} ms, exact {ms_exact:.3f}, in one kernel "
            f"{ms_one:.3f}",
            flush=True,
        )
        found.append({"layer": layer.name, "served": ms_served, "exact": ms_exact, "one kernel": ms_one})
        times: dict[tuple[str, bool], list[tuple[float, str]]] = {}
        for kind, tiles, exact in tries(layer):
            call = batch.in_two(tiles, exact=exact)
            try:
                out = call()
                wrong = float((out.double() - expected.double()).norm() / expected.double().norm())
                ms = by_kernel(call)
            except Exception as error:
                print(f"    {tiles}: {str(error).splitlines()[0][:90]}", flush=True)
                continue
            time_ms = sum(value for name, value in ms.items() if f"attend_{kind}" in name)
            shape = {
                "weights": (
                    tiles.pairs,
                    tiles.depth,
                    tiles.weights_warps,
                    tiles.weights_stages,
                    tiles.weights_registers,
                ),
                "values": (
                    tiles.pairs,
                    tiles.values_pairs,
                    tiles.columns,
                    tiles.values_keys,
                    tiles.values_warps,
                    tiles.values_stages,
                    tiles.values_registers,
                ),
            }[kind]
            if not wrong < 0.02:
                print(f"FAULT {layer.name} {tiles} exact {exact}: differs by {wrong:.3g}")
            times.setdefault((kind, exact), []).append((time_ms, "x".join(map(str, shape))))
            found.append({"layer": layer.name, "kernel": kind, "exact": exact, "tile": shape, "ms": time_ms})
        for (kind, exact), ranked in times.items():
            text = ", ".join(f"{shape} {ms:.3f}" for ms, shape in sorted(ranked))
            print(f"  {kind}, {'exact' if exact else 'fast'}, ms: {text}", flush=True)
    return found


def steps(layer: Layer) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Decode and verify steps by name, with each kernel."""
    from gemray_kernels.triton.exact_attention import exact_paged_attention
    from gemray_kernels.triton.paged_attention import Tile, paged_attention

    for num_seqs, rows, keys in STEPS:
        batch = Batch.of(layer, rows, keys, num_seqs)
        batch = replace(batch, arguments=widened(batch.arguments))
        name = f"{num_seqs} x {rows} | {keys}"
        yield name, batch.attention(paged_attention, most_rows=rows)
        yield name, batch.attention(exact_paged_attention, most_rows=rows)
        for tile in OTHER_TILES:
            yield name, batch.attention(exact_paged_attention, most_rows=rows, tile=Tile(*tile))


def decode() -> list[dict[str, Any]]:
    """Time decode and verify steps, in microseconds a call."""
    others = " | ".join("x".join(map(str, tile)) for tile in OTHER_TILES)
    print(
        f"\n| layer | sequences x rows | keys | fast us | exact us | {others} |\n|{' --- |' * (5 + len(OTHER_TILES))}"
    )
    found = []
    for layer in LAYERS:
        by_step: dict[str, list[float]] = {}
        for name, call in steps(layer):
            try:
                time_us = graph_us(call)
            except Exception as error:
                print(f"    {str(error).splitlines()[0][:90]}", flush=True)
                time_us = float("nan")
            by_step.setdefault(name, []).append(time_us)
        for name, us in by_step.items():
            print(f"| {layer.name} | {name} | {' | '.join(f'{time_us:.1f}' for time_us in us)} |", flush=True)
            found.append({"layer": layer.name, "step": name, "us": us})
    return found


def widened(arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same batch with block tables of 32,768 tokens, as a server has them."""
    table_SP = torch.nn.functional.pad(arguments[3], (0, 2048 - arguments[3].shape[1]))
    return (*arguments[:3], table_SP, *arguments[4:])


def graph_us(call: Callable[[], object], calls: int = 20) -> float:
    """Microseconds of a call inside a graph of several."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return 1e3 * median_ms(graph.replay) / calls


def bits(layer: Layer) -> int:
    """Compare rows of a prompt with the same rows in other calls; the number that differ."""
    from gemray_kernels.triton.exact_attention import exact_paged_attention

    faults = 0
    for keys, rows in ((300, 290), (1500, 600), (9000, 400)):
        for gain in (1.5, 20.0):
            batch = Batch.of(layer, rows, keys, gain=gain)
            whole = batch.attention(exact_paged_attention)()
            differing = {}
            for size in (1, 5, 16, 33, 200):
                places = sorted({0, 1, 63, 127, 128, 129, rows // 2, rows - size} & set(range(rows - size + 1)))
                parts = [batch.cut(place, size, keys - rows) for place in places]
                differing[size] = sum(
                    int(
                        (
                            part.attention(exact_paged_attention, partial_bytes=held)() != whole[place : place + size]
                        ).sum()
                    )
                    for place, part in zip(places, parts, strict=True)
                    for held in (1 << 29, 0)
                )
            faults += sum(differing.values())
            print(
                f"bits {layer.name}, {rows} rows, {keys} keys, gain {gain}: differing by rows of a call {differing}",
                flush=True,
            )
    return faults


def main() -> None:
    """Run the parts, whose programs many processes compile first; exit with 1 where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("bits", "decode", "prompts"), help="one part alone")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    found: dict[str, Any] = {}
    parts = [arguments.only] if arguments.only else ["bits", "decode", "prompts"]
    faults = 0
    with multiprocessing.get_context("spawn").Pool(PROCESSES, maxtasksperchild=None) as pool:
        waiting: list[Any] = []
        if "prompts" in parts:
            waiting += [
                pool.apply_async(compile_tiles, (layer, tiles, exact))
                for layer in LAYERS[:2]
                for _, tiles, exact in tries(layer)
            ]
        if "decode" in parts:
            waiting += [pool.apply_async(compile_steps, (layer,)) for layer in LAYERS]
        if "bits" in parts:
            faults = sum(pool.map(bits, LAYERS, chunksize=1))
            print(f"bits: {faults} numbers differ ({time.monotonic() - began:.0f} s)", flush=True)
        for task in waiting:
            try:
                task.get()
            except Exception as error:
                print(f"    {str(error).splitlines()[0][:120]}", flush=True)
    print(f"(compiled after {time.monotonic() - began:.0f} s)", flush=True)
    if "decode" in parts:
        found["decode"] = decode()
        print(f"({time.monotonic() - began:.0f} s)", flush=True)
    if "prompts" in parts:
        found["prompts"] = prompts()
        print(f"({time.monotonic() - began:.0f} s)", flush=True)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "attention_kernels.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
