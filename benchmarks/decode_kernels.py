"""Times what decode and verify steps are made of, beside cuBLAS and the time of the bytes alone.

    PYTHONPATH=kernels:workers:proto:cluster:tests python benchmarks/decode_kernels.py [--parts linears,experts,...]

Every time is the median of replays of a CUDA graph that holds the work several times over inputs that exceed the cache
together. Results are checked against float64 first, outputs poisoned. With OUT in the environment everything that was
measured is written to $OUT/decode_kernels.json.

linears     tiles of `gemray_kernels.triton.linear` for every weight shape of the published models, beside cuBLAS
experts     tiles of the two products of 26B-A4B's experts at few rows
attention   chunks and tiles
small       norms and attention's inputs
layers      whole models cut to a few layers: with the library's products, with streamed ones, with early starts
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from gemray_kernels.reference.attention_inputs import KVWrite
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.reference.paged_attention import paged_attention
from gemray_kernels.table import REFERENCE, Kernels, triton_kernels
from gemray_kernels.triton import attention_inputs as inputs_module
from gemray_kernels.triton import embedding, few_rows_experts, gate, layer_norms, rope, routing
from gemray_kernels.triton import linear as linear_module
from gemray_kernels.triton import paged_attention as attention_module
from gemray_kernels.triton.expert_tile import Tile as ExpertTile
from gemray_kernels.triton.linear import Gate, LinearTile, gated_linear_in_tiles, linear_in_tiles
from support.kernels.fused_parity import fused_errors, fused_runs

DEVICE = torch.device("cuda")
CACHE_BYTES = 50 << 20
CEILING = 3.06e12
"""Bytes a second of a sum over 2 GiB."""
REPLAYS = 9
EARLY_MODULES = [
    inputs_module,
    embedding,
    few_rows_experts,
    gate,
    layer_norms,
    linear_module,
    rope,
    routing,
    attention_module,
]

Call = Callable[[], object]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, gain: float = 1.0) -> Tensor:
    """Never zeros: they can run faster than data does."""
    return (torch.randn(shape, device=DEVICE, dtype=torch.float32) * gain).to(dtype)


@contextmanager
def early(on: bool) -> Iterator[None]:
    """Kernels start early, or not."""
    with ExitStack() as stack:
        for module in EARLY_MODULES:
            stack.enter_context(mock.patch.object(module, "starts_early", lambda x: on))
        yield


def median_us(calls: Sequence[Call]) -> float:
    """Device time of one of the calls, which are captured one after the other."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


class Report:
    """What was measured, printed as it comes and kept for the file."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.faults: list[str] = []

    def row(self, part: str, text: str, **values: Any) -> None:
        self.rows.append({"part": part, **values})
        print(text, flush=True)

    def fault(self, text: str) -> None:
        self.faults.append(text)
        print("FAULT " + text, flush=True)


# Linear layers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    model: str
    name: str
    num_out: int
    num_in: int
    kind: str = "summands"
    """summands: the reader adds up parts; whole; gelu, silu: gate and up rows; wide: float32 results."""

    @property
    def bytes(self) -> int:
        return self.num_out * self.num_in * 2


WEIGHTS = [
    Weight("31B", "qkv sliding", 16384, 5376),
    Weight("31B", "qkv full", 18432, 5376),
    Weight("31B", "o sliding", 5376, 8192),
    Weight("31B", "o full", 5376, 16384),
    Weight("31B", "gate_up", 43008, 5376, "gelu"),
    Weight("31B", "down", 5376, 21504),
    Weight("26B-A4B", "qkv sliding", 8192, 2816),
    Weight("26B-A4B", "qkv full", 9216, 2816),
    Weight("26B-A4B", "o sliding", 2816, 4096),
    Weight("26B-A4B", "o full", 2816, 8192),
    Weight("26B-A4B", "gate_up", 4224, 2816, "gelu"),
    Weight("26B-A4B", "down", 2816, 2112),
    Weight("26B-A4B", "router", 128, 2816, "wide"),
    Weight("E4B", "qkv sliding", 3072, 2560),
    Weight("E4B", "q sliding", 2048, 2560),
    Weight("E4B", "qkv full", 6144, 2560),
    Weight("E4B", "q full", 4096, 2560),
    Weight("E4B", "o sliding", 2560, 2048),
    Weight("E4B", "o full", 2560, 4096),
    Weight("E4B", "gate_up", 20480, 2560, "gelu"),
    Weight("E4B", "down", 2560, 10240),
    Weight("E4B", "layer gate", 256, 2560),
    Weight("E4B", "layer projection", 2560, 256),
    Weight("E4B", "model projection", 10752, 2560, "whole"),
    Weight("E2B", "qkv sliding", 2560, 1536),
    Weight("E2B", "q sliding", 2048, 1536),
    Weight("E2B", "qkv full", 5120, 1536),
    Weight("E2B", "q full", 4096, 1536),
    Weight("E2B", "o sliding", 1536, 2048),
    Weight("E2B", "o full", 1536, 4096),
    Weight("E2B", "gate_up", 12288, 1536, "gelu"),
    Weight("E2B", "gate_up wide", 24576, 1536, "gelu"),
    Weight("E2B", "down", 1536, 6144),
    Weight("E2B", "down wide", 1536, 12288),
    Weight("E2B", "layer gate", 256, 1536),
    Weight("E2B", "layer projection", 1536, 256),
    Weight("E2B", "model projection", 8960, 1536, "whole"),
    Weight("31B MTP", "q sliding", 8192, 1024),
    Weight("31B MTP", "q full", 16384, 1024),
    Weight("31B MTP", "o sliding", 1024, 8192),
    Weight("31B MTP", "o full", 1024, 16384),
    Weight("31B MTP", "gate_up", 16384, 1024, "gelu"),
    Weight("31B MTP", "down", 1024, 8192),
    Weight("31B MTP", "pre", 1024, 10752, "summands"),
    Weight("31B MTP", "post", 5376, 1024, "whole"),
    Weight("26B MTP", "q sliding", 4096, 1024),
    Weight("26B MTP", "o sliding", 1024, 4096),
    Weight("26B MTP", "pre", 1024, 5632, "summands"),
    Weight("26B MTP", "post", 2816, 1024, "whole"),
    Weight("E4B MTP", "q full", 2048, 256),
    Weight("E4B MTP", "o full", 256, 2048),
    Weight("E4B MTP", "gate_up", 4096, 256, "gelu"),
    Weight("31B DFlash", "fc", 5376, 32256, "summands"),
    Weight("31B DFlash", "qkv", 10240, 5376),
    Weight("31B DFlash", "kv", 2048, 5376),
    Weight("31B DFlash", "gate_up", 21504, 5376, "silu"),
    Weight("31B DFlash", "down", 5376, 10752),
    Weight("26B DFlash", "fc", 2816, 16896, "summands"),
    Weight("26B DFlash", "qkv", 6144, 2816),
    Weight("26B DFlash", "kv", 2048, 2816),
    Weight("26B DFlash", "gate_up", 11264, 2816, "silu"),
    Weight("26B DFlash", "down", 2816, 5632),
    Weight("31B", "head", 262144, 5376, "wide"),
    Weight("26B-A4B", "head", 262144, 2816, "wide"),
    Weight("MTP", "head", 262144, 1024, "wide"),
]

TILES = [
    LinearTile(64, 128, 4, 3),
    LinearTile(64, 128, 4, 5),
    LinearTile(64, 128, 4, 7),
    LinearTile(64, 256, 4, 3),
    LinearTile(64, 64, 4, 8),
    LinearTile(128, 64, 4, 6),
    LinearTile(128, 128, 4, 4),
    LinearTile(128, 128, 8, 4),
    LinearTile(128, 64, 8, 6),
    LinearTile(64, 128, 4, 5, weight_first=False),
    LinearTile(32, 128, 4, 6, weight_first=False),
    LinearTile(32, 256, 4, 4, weight_first=False),
    LinearTile(16, 256, 4, 5, weight_first=False),
    LinearTile(16, 512, 4, 3, weight_first=False),
]
GATED_TILES = [
    LinearTile(64, 128, 4, 3),
    LinearTile(64, 64, 4, 4),
    LinearTile(64, 64, 4, 6),
    LinearTile(64, 128, 8, 4),
    LinearTile(128, 64, 4, 4),
    LinearTile(128, 64, 8, 4),
    LinearTile(64, 128, 4, 3, weight_first=False),
    LinearTile(32, 128, 4, 4, weight_first=False),
    LinearTile(32, 256, 4, 3, weight_first=False),
    LinearTile(16, 256, 4, 4, weight_first=False),
    LinearTile(16, 512, 4, 2, weight_first=False),
]
PLAIN_FOR_GATE = [LinearTile(64, 128, 4, 5), LinearTile(128, 64, 4, 6), LinearTile(128, 128, 4, 4)]
HEAD_TILES = [
    LinearTile(64, 128, 4, 5),
    LinearTile(128, 64, 4, 6),
    LinearTile(128, 128, 4, 4),
    LinearTile(128, 128, 8, 4),
]


def candidates(weight: Weight) -> Iterator[LinearTile]:
    if weight.kind in ("gelu", "silu"):
        yield from GATED_TILES
        return
    if weight.num_out >= 1 << 18:
        yield from HEAD_TILES
        return
    for tile in TILES:
        programs = -(-weight.num_out // tile.outputs)
        splits = {1}
        if weight.kind != "whole":
            splits |= {round(target / programs) for target in (132, 264, 396, 528)}
        for split in sorted(splits):
            fits = 1 <= split <= 16 and weight.num_in // max(split, 1) >= 2 * tile.inputs
            if split == 1 or (fits and programs * split <= 1100):
                yield replace(tile, splits=split)


def run_linear(weight: Weight, x: Tensor, w: Tensor, tile: LinearTile) -> Tensor:
    if weight.kind in ("gelu", "silu"):
        return gated_linear_in_tiles(x, w, tile, Gate[weight.kind.upper()])
    narrow = tile.splits == 1 and weight.kind != "wide"
    return linear_in_tiles(x, w, tile, out_dtype=x.dtype if narrow else torch.float32)


def run_library(weight: Weight, x: Tensor, w: Tensor, kernels: Kernels) -> Tensor:
    if weight.kind == "wide":
        return REFERENCE.wide_summands(x, w)
    y = torch.nn.functional.linear(x, w)
    return {"gelu": kernels.gelu_tanh_and_mul, "silu": kernels.silu_and_mul}.get(weight.kind, lambda y: y)(y)


def expected_linear(weight: Weight, x: Tensor, w: Tensor) -> Tensor:
    rows = 1 << 16
    y = torch.cat([x.double() @ part.double().t() for part in w.split(rows)], dim=1)
    if weight.kind == "gelu":
        return REFERENCE.gelu_tanh_and_mul(y)
    return REFERENCE.silu_and_mul(y) if weight.kind == "silu" else y


def linears(report: Report, only: str) -> None:
    pool = random(1 << 31)
    kernels = triton_kernels()
    print("| model | weight | kind | MB | floor | library 1 / 8 / 16 / 64 | tile | 1 / 8 / 16 / 64 | early 1 / 8 |")
    for weight in WEIGHTS:
        if only not in f"{weight.model} {weight.name}":
            continue
        count = max(2, min(16, 3 * CACHE_BYTES // weight.bytes + 1, pool.nbytes // weight.bytes))
        size = weight.num_out * weight.num_in
        gain = weight.num_in**-0.5
        sets = [pool[c * size : (c + 1) * size].view(weight.num_out, weight.num_in) for c in range(count)]
        xs = {t: random(t, weight.num_in, gain=gain) for t in (1, 5, 8, 16, 33, 64)}
        library = {
            t: median_us([lambda w=w, t=t: run_library(weight, xs[t], w, kernels) for w in sets])
            for t in (1, 8, 16, 64)
        }
        found: dict[LinearTile, dict[str, float]] = {}
        with early(False):
            for tile in candidates(weight):
                try:
                    found[tile] = {"1": median_us([lambda w=w: run_linear(weight, xs[1], w, tile) for w in sets])}
                except Exception as fault:
                    found[tile] = {"1": float("inf")}
                    report.rows.append({"part": "fault", "tile": asdict(tile), "fault": str(fault)[:200]})
            best = sorted(found, key=lambda tile: found[tile]["1"])[:5]
            for tile in best:
                for t in (8, 16):
                    found[tile][str(t)] = median_us([lambda w=w, t=t: run_linear(weight, xs[t], w, tile) for w in sets])
            chosen = min(best, key=lambda tile: found[tile]["1"] + found[tile]["8"])
            times = dict(found[chosen])
            times["64"] = median_us([lambda w=w: run_linear(weight, xs[64], w, chosen) for w in sets])
        with early(True):
            for t in (1, 8):
                calls = [lambda w=w, t=t: run_linear(weight, xs[t], w, chosen) for w in sets]
                times[f"early {t}"] = median_us(calls)
        check_linear(report, weight, xs, sets[0], chosen)
        numbers = [f"{times[key]:.1f}" for key in ("1", "8", "16", "64", "early 1", "early 8")]
        report.row(
            "linears",
            f"| {weight.model} | {weight.name} | {weight.kind} | {weight.bytes / 1e6:.1f} | "
            f"{weight.bytes / CEILING * 1e6:.1f} | {' / '.join(f'{t:.1f}' for t in library.values())} | "
            f"{short(chosen)} | {' / '.join(numbers[:4])} | {' / '.join(numbers[4:])} |",
            weight=asdict(weight),
            library=library,
            tile=asdict(chosen),
            times=times,
            all=[{"tile": asdict(tile), **value} for tile, value in found.items()],
        )


def short(tile: LinearTile) -> str:
    order = "W" if tile.weight_first else "x"
    return f"{order} {tile.outputs}x{tile.inputs} w{tile.num_warps} s{tile.num_stages} /{tile.splits}"


def check_linear(report: Report, weight: Weight, xs: dict[int, Tensor], w: Tensor, tile: LinearTile) -> None:
    """Against float64, and that a row's bits do not depend on the number of rows."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # poisons new tensors
    expected = expected_linear(weight, xs[64], w)
    whole = run_linear(weight, xs[64], w, tile)
    summed = whole.float().sum(0) if whole.dim() == 3 else whole
    if not (wrong := error(summed, expected)) < 1e-2:
        report.fault(f"{weight} {tile}: error {wrong} at 64 rows")
    for t in (1, 5, 16, 33):
        part = run_linear(weight, xs[64][:t], w, tile)
        same = torch.equal(part, whole[:, :t] if whole.dim() == 3 else whole[:t])
        if not same:
            report.fault(f"{weight.model} {weight.name} {short(tile)}: bits at {t} rows differ from those at 64")
    torch.use_deterministic_algorithms(False)


# Experts ----------------------------------------------------------------------------------------------------------


def experts(report: Report) -> None:
    gate_up, down = random(128, 1408, 2816, gain=0.02), random(128, 2816, 704, gain=0.04)
    default = few_rows_experts.tiles_for(torch.bfloat16)
    ups = [
        (16, 256, 4, 4),
        (16, 256, 4, 6),
        (16, 512, 4, 3),
        (32, 128, 4, 4),
        (32, 128, 4, 6),
        (32, 256, 4, 3),
        (64, 128, 4, 3),
    ]
    downs = [
        (32, 64, 4, 8),
        (64, 64, 4, 6),
        (64, 64, 4, 8),
        (128, 64, 4, 5),
        (32, 128, 4, 5),
        (64, 128, 4, 4),
        (16, 256, 4, 4),
    ]
    for rows in (1, 5, 8, 16):
        sets = []
        touched = []
        for _ in range(8):
            weights, numbers = REFERENCE.choose_experts(random(rows, 128, dtype=torch.float32), random(128), 8)
            touched.append(len(numbers.unique()))
            sets.append((random(rows, 2816), weights, numbers))
        floor = statistics.mean(touched) * 3 * 704 * 2816 * 2 / CEILING * 1e6
        before = median_us([lambda x=x, w=w, n=n: list_path(x, w, n, gate_up, down) for x, w, n in sets])
        found = {}
        with early(False):
            for up, dn in [*((u, None) for u in ups), *((None, d) for d in downs)]:
                tiles = (
                    default[0] if up is None else ExpertTile(16, *up),
                    default[1] if dn is None else ExpertTile(16, *dn),
                )
                try:
                    found[str(("up", up) if dn is None else ("down", dn))] = median_us(
                        [
                            lambda x=x, n=n, tiles=tiles: few_rows_experts.expert_outputs(x, n, gate_up, down, tiles)
                            for x, _, n in sets
                        ]
                    )
                except Exception as fault:
                    report.rows.append({"part": "fault", "tile": str(tiles), "fault": str(fault)[:200]})
        with early(True):
            ahead = median_us(
                [lambda x=x, n=n: few_rows_experts.expert_outputs(x, n, gate_up, down) for x, _, n in sets]
            )
        x, _, n = sets[0]
        torch.use_deterministic_algorithms(True, warn_only=True)
        got = few_rows_experts.expert_outputs(x, n, gate_up, down)
        torch.use_deterministic_algorithms(False)
        expected = torch.stack(
            [
                torch.stack(
                    [
                        REFERENCE.gelu_tanh_and_mul(x[t].double() @ gate_up[e].double().t()) @ down[e].double().t()
                        for e in n[t].tolist()
                    ]
                )
                for t in range(rows)
            ]
        )
        if not (wrong := error(got, expected)) < 1e-2:
            report.fault(f"experts at {rows} rows: error {wrong}")
        text = ", ".join(f"{k} {v:.1f}" for k, v in sorted(found.items(), key=lambda item: item[1])[:14])
        report.row(
            "experts",
            f"experts, {rows} rows, {statistics.mean(touched):.0f} touched: floor {floor:.1f}, before {before:.1f}, "
            f"early {ahead:.1f}; {text}",
            rows=rows,
            floor=floor,
            before=before,
            found=found,
            early=ahead,
        )
    for rows in (1, 8):
        logits = [random(4, rows, 128, dtype=torch.float32) for _ in range(8)]
        scale = random(128)
        times = [
            median_us([lambda x=x: kernel(x) for x in logits])
            for kernel in (
                lambda x: routing.route(x, scale, 8),
                lambda x: triton_kernels().choose_experts(x[0], scale, 8),
            )
        ]
        report.row("route", f"route, {rows} rows: {times[0]:.1f}, before {times[1]:.1f}", rows=rows, times=times)


def list_path(x: Tensor, w: Tensor, n: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The kernels that list each expert's rows first."""
    with mock.patch.object(few_rows_experts, "MOST_ROWS", 0):
        return triton_kernels().gated_experts(x, w, n, gate_up, down)


# Attention --------------------------------------------------------------------------------------------------------


def attention(report: Report) -> None:
    groups = {
        "31B sliding": (32, 16, 256, 1024),
        "31B full": (32, 4, 512, None),
        "E4B sliding": (8, 2, 256, 512),
        "DFlash": (64, 8, 128, 2048),
    }
    for name, (heads, kv_heads, dim, window) in groups.items():
        for batch, rows, context in [(1, 1, 640), (8, 1, 640), (1, 5, 640), (8, 5, 640), (8, 16, 640), (8, 1, 4000)]:
            if (name == "DFlash") != (rows == 16):
                continue
            sets = list(attention_sets(heads, kv_heads, dim, window, batch, rows, context))
            keyword: dict[str, Any] = {"window": window, "causal": True, "scale": 1.0}
            seen = context if window is None else min(context, window + rows - 1)
            floor = batch * seen * kv_heads * dim * 4 / CEILING * 1e6
            found: dict[str, float] = {}

            def timed(label: str, kernel: Callable[..., Tensor], *, on: bool = False, **more: Any) -> None:
                with early(on):
                    found[label] = median_us([lambda a=a: kernel(*a, **keyword, **more) for a in sets])

            timed("rows unknown", attention_module.paged_attention)
            timed("rows known", attention_module.paged_attention, most_rows=rows)
            timed("early", attention_module.paged_attention, on=True, most_rows=rows)
            for chunk in (64, 128):
                with mock.patch.object(attention_module, "MIN_CHUNK", chunk):
                    timed(f"chunks of {chunk}", attention_module.paged_attention, most_rows=rows)
            for pairs, keys, warps, stages in [(16, 32, 4, 2), (16, 64, 8, 2), (16, 128, 8, 1)]:
                tile = attention_module.Tile(max(pairs, heads // kv_heads), keys, warps, stages)
                more = {"most_rows": rows, "tile": tile}
                try:
                    timed(f"{pairs} {keys} {warps} {stages}", attention_module.paged_attention, **more)
                except Exception as fault:
                    report.rows.append({"part": "fault", "tile": str(tile), "fault": str(fault)[:200]})
            arguments = sets[0]
            torch.use_deterministic_algorithms(True, warn_only=True)
            got = attention_module.paged_attention(*arguments, **keyword, most_rows=rows)
            torch.use_deterministic_algorithms(False)
            wide = [a.double() if a.is_floating_point() else a for a in arguments]
            expected = paged_attention(*wide, **keyword)
            if not (wrong := error(got, expected)) < 1e-2:
                report.fault(f"attention {name} {batch} x {rows} over {context}: error {wrong}")
            text = ", ".join(f"{k}: {v:.1f}" for k, v in sorted(found.items(), key=lambda item: item[1])[:7])
            report.row(
                "attention",
                f"attention {name}, {batch} x {rows}, {context} keys: floor {floor:.1f}, "
                f"rows known {found['rows known']:.1f}; {text}",
                name=name,
                batch=batch,
                rows=rows,
                context=context,
                floor=floor,
                found=found,
            )


def attention_sets(
    heads: int, kv_heads: int, dim: int, window: int | None, batch: int, rows: int, context: int
) -> Iterator[tuple[Tensor, ...]]:
    pages_each = -(-context // 16)
    read = batch * context * kv_heads * dim * 4
    for _ in range(max(2, min(12, 3 * CACHE_BYTES // read + 1))):
        k_pages, v_pages = (random(1 + batch * pages_each, 16, kv_heads, dim) for _ in range(2))
        table_SP = torch.zeros(batch, 512, device=DEVICE, dtype=torch.int32)
        table_SP[:, :pages_each] = (torch.randperm(batch * pages_each, device=DEVICE) + 1).view(batch, pages_each)
        yield (
            random(batch * rows, heads, dim, gain=1.5 / dim**0.5),
            k_pages,
            v_pages,
            table_SP,
            torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * rows,
            torch.full((batch,), context, device=DEVICE, dtype=torch.int32),
        )


# Small kernels ----------------------------------------------------------------------------------------------------


def small(report: Report) -> None:
    """31B: what lies between the products."""
    for rows in (1, 7, 16, 40):
        runs = fused_runs("cuda", rows, rows=rows, width=2816, heads=16, kv_heads=8, head_dim=256, experts=128, top_k=8)
        for dtype, limit in ((torch.bfloat16, 1e-2), (torch.float32, 3e-6)):
            for on in (False, True):
                with early(on):
                    for name, wrong in fused_errors(triton_kernels(), runs, dtype).items():
                        if not wrong < limit:
                            report.fault(f"{name} of {rows} rows, {dtype}, early {on}: error {wrong}")
    kernels = triton_kernels()
    heads, kv_heads, dim, hidden = 32, 16, 256, 5376
    norm, head_norm = Norm(random(hidden), 1e-6), Norm(random(dim), 1e-6)
    for rows in (1, 8, 40):
        pages = [random(64, 16, kv_heads, dim) for _ in range(2)]
        slots = torch.randperm(64 * 16, device=DEVICE)[:rows]
        write = KVWrite(head_norm, True, *pages, slots)
        angle = torch.rand(rows, 1, dim, device=DEVICE) * 6
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        for summands in (1, 3):
            dtype = torch.bfloat16 if summands == 1 else torch.float32
            parts = [random(summands, rows, hidden, dtype=dtype) for _ in range(6)]
            qkv = [random(summands, rows, (heads + 2 * kv_heads) * dim, dtype=dtype) for _ in range(6)]
            x = random(rows, hidden)
            found: dict[str, float] = {}
            for label, on in (("fused", False), ("early", True)):
                with early(on):
                    found[f"norms {label}"] = median_us(
                        [lambda p=p: kernels.add_then_norms(x, p, norm, None, [norm]) for p in parts]
                    )
                    found[f"inputs {label}"] = median_us(
                        [lambda p=p: kernels.attention_inputs(p, cos, sin, heads, head_norm, write) for p in qkv]
                    )
            got = kernels.add_then_norms(x, parts[0], norm, None, [norm])
            wide = Norm(norm.weight_D.double(), 1e-6)
            for a, b in zip(
                got, REFERENCE.add_then_norms(x.double(), parts[0].double(), wide, None, [wide]), strict=True
            ):
                if not (wrong := error(a, b)) < 1e-2:
                    report.fault(f"norms of {rows} rows: error {wrong}")
            text = ", ".join(f"{k} {v:.1f}" for k, v in found.items())
            report.row("small", f"small, {rows} rows, {summands} summands: {text}", rows=rows, found=found)


# Whole layers -----------------------------------------------------------------------------------------------------


class Switch:
    """A table of kernels that can be exchanged under a model that has been built."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: getattr(self.kernels, name)(*arguments)


def layers(report: Report) -> None:
    from gemray_workers.checkpoint.random_weights import random_weights
    from gemray_workers.model.config import ModelConfig
    from gemray_workers.model.target import TargetModel
    from gemray_workers.parallel.communicator import SoloCommunicator
    from support.oracles.paged import PagedCache, Rows

    library = replace(
        triton_kernels(),
        linear=REFERENCE.linear,
        summands=REFERENCE.summands,
        wide_summands=REFERENCE.wide_summands,
        gelu_linear=lambda x, w: triton_kernels().gelu_tanh_and_mul(torch.nn.functional.linear(x, w)),
    )
    variants = {
        "library products": (library, False),
        "library products, early": (library, True),
        "streamed products": (triton_kernels(), False),
        "streamed products, early": (triton_kernels(), True),
    }
    for name, num_layers in (("31B-it", 12), ("26B-A4B-it", 12), ("E4B-it", 42)):
        root = Path(__file__).parent / "configs" / name
        config = ModelConfig.from_directory(root)
        config = replace(config, layers=config.layers[:num_layers])
        switch = Switch(library)
        with mock.patch(
            "gemray_workers.model.weight_sharding.kernels_for", lambda device, dtype, switch=switch: switch
        ):
            model = TargetModel(
                config,
                SoloCommunicator(),
                dtype=torch.bfloat16,
                device=DEVICE,
                attention=attention_module.paged_attention,
            )
        random_weights("", model.weight_targets(), prefix="", is_ignored=lambda name: False)
        for batch, rows in ((1, 1), (8, 1), (1, 5), (8, 5)):
            cache = PagedCache(
                config, num_sequences=batch, max_len=2048, dtype=torch.bfloat16, page_size=16, device=DEVICE
            )
            for spec in cache.caches._readers.values():
                spec.k_pages.copy_(random(*spec.k_pages.shape))
                spec.v_pages.copy_(random(*spec.v_pages.shape))
            sets = [
                cache.batch([Rows(s, torch.randint(0, 262144, (rows,)).tolist(), 640) for s in range(batch)])
                for _ in range(2)
            ]
            found: dict[str, float] = {}
            outputs: dict[str, Tensor] = {}
            for label, (table, on) in variants.items():
                switch.kernels = table
                try:
                    with early(on):
                        outputs[label] = model.forward(sets[0], cache.caches).hidden_TH.double()
                        found[label] = median_us([lambda b=b: model.forward(b, cache.caches) for b in sets])
                except Exception:
                    report.fault(f"layers {name} {batch} x {rows} {label}: {traceback.format_exc()[-1500:]}")
                    torch.cuda.synchronize()
                    continue
                wrong = error(outputs[label], outputs.get("library products", outputs[label]))
                if not wrong < 0.1:
                    report.fault(f"layers {name} {batch} x {rows} {label}: differs by {wrong}")
            text = ", ".join(f"{k} {v:.0f}" for k, v in found.items())
            report.row(
                "layers",
                f"layers {name} ({num_layers}), {batch} x {rows}: {text}",
                name=name,
                layers=num_layers,
                batch=batch,
                rows=rows,
                found=found,
            )
        del model
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="small,layers,experts,attention,linears")
    parser.add_argument("--only", default="", help="linear layers whose model and name contain this")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    parts: dict[str, Callable[[], None]] = {
        "linears": lambda: linears(report, arguments.only),
        "experts": lambda: experts(report),
        "attention": lambda: attention(report),
        "small": lambda: small(report),
        "layers": lambda: layers(report),
    }
    for part in arguments.parts.split(","):
        started = time.monotonic()
        try:
            parts[part]()
        except Exception:
            report.fault(f"{part}: {traceback.format_exc()[-3000:]}")
        print(f"-- {part}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if out := os.environ.get("OUT"):
            Path(out, "decode_kernels.json").write_text(json.dumps(report.rows, default=str))
    print(f"{len(report.faults)} faults")
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
