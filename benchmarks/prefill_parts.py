"""Where the time of a prompt goes: what each kind of kernel takes of a forward pass over many rows.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python -m prefill_parts [--out DIRECTORY]

A model is cut to its first layers, six by default: 31B has five sliding layers and one full one, ten times. Weights are
random. For each length the prompt is computed in chunks, as an engine would; a pass is timed by events, then profiled,
and its kernels are added up by kind. Beside each kind stands what it has to do: a product's operations at the rate of a
product alone, attention's at the same rate, and of every other kernel the bytes that it reads and writes once at the
rate of a large copy. The rate of products is measured twice, over a moment and over a second of the layers' own
products: a card that works for long lowers its clock.

``--tiles`` times the attention of long rows with other tiles, each checked against the one that is served. ``--device
cpu --model gemray-tiny`` runs the whole script where there is no card; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gemray_kernels.reference.paged_attention import paged_attention as reference_attention
from gemray_workers.checkpoint.random_weights import random_weights
from gemray_workers.embedded import embedded_path
from gemray_workers.model.attention import AttentionKernel
from gemray_workers.model.config import LayerConfig, ModelConfig
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.blueprint import device_name
from support.oracles.paged import PagedCache, Rows

CONFIGS = Path(__file__).parent / "configs"
PAGE_SIZE = 16
REPEATS = 5
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("attend_", "combine_")),
    ("experts", ("_gate_up_kernel", "_down_kernel", "_list_pairs_kernel")),
    ("gate", ("_gated_kernel",)),
    ("norms", ("_add_then_norms", "_rms_norm", "rms_norm")),
    ("attention inputs", ("_attention_inputs",)),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "_linear_kernel", "cublas", "splitK", "splitk")),
)
"""Kinds of kernels by parts of their names; the first that fits."""
OTHERS = "others"
TILES = (
    (64, 32, 8, 2),
    (64, 32, 8, 3),
    (64, 64, 8, 1),
    (64, 32, 4, 2),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (128, 32, 8, 2),
    (128, 32, 8, 3),
    (128, 32, 8, 5),
    (128, 64, 8, 1),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
)
"""(pairs, keys, warps, stages) that ``--tiles`` tries."""


@dataclass(frozen=True)
class Work:
    """What a chunk's pass through the layers has to do, by kind."""

    operations: dict[str, float]
    """A multiplication and an addition counted as two."""
    bytes: dict[str, float]

    @classmethod
    def of(cls, config: ModelConfig, rows: int, before: int, last_rows: int) -> Work:
        """The work of `rows` rows behind `before` keys; in the last layer, attention and feed-forward of `last_rows`
        alone."""
        operations: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        hidden, item = config.hidden_size, 2
        for layer in config.layers:
            is_last = layer.index + 1 == len(config.layers)
            behind = last_rows if is_last else rows
            q_width, kv_width = config.num_attention_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
            width = q_width + kv_width * (1 if layer.k_eq_v else 2)
            operations["products"] += 2 * rows * hidden * width
            operations["products"] += 2 * behind * (q_width * hidden + 3 * hidden * layer.intermediate_size)
            if config.moe is not None:
                per_row = config.moe.top_k * 3 * hidden * config.moe.intermediate_size
                operations["experts"] += 2 * behind * per_row
            operations["attention"] += 4 * q_width * _visible(layer, rows, before, behind)
            moved["attention inputs"] += item * rows * (width + q_width + 2 * kv_width)
            moved["norms"] += item * behind * hidden * 4 * 2
            moved["gate"] += item * behind * layer.intermediate_size * 3
        return cls(dict(operations), dict(moved))


def _visible(layer: LayerConfig, rows: int, before: int, behind: int) -> int:
    """(row, key) pairs that the last `behind` of `rows` rows see."""
    window = layer.window or (before + rows)
    return sum(min(position + 1, window) for position in range(before + rows - behind, before + rows))


def main() -> None:
    """Print one table a length; exit with 1 where a tile's result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="31B-it", help="a directory of benchmarks/configs, or an embedded model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--chunk", type=int, default=4096, help="rows of a pass, at most")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiles", action="store_true", help="also time attention with other tiles")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds after which no other tile is tried")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    directory = CONFIGS / arguments.model
    config = ModelConfig.from_directory(directory if directory.exists() else embedded_path(arguments.model))
    layers = config.layers[: arguments.layers]
    config = replace(config, layers=layers)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    found: dict[str, Any] = {"model": arguments.model, "layers": len(layers), "device": device_name(device)}
    print(f"{found['device']}, torch {torch.__version__}, {arguments.model}, {len(layers)} layers", flush=True)
    faults: list[str] = []
    with torch.inference_mode():
        rates = found["rates"] = measure_rates(config, device, arguments.chunk)
        print(
            f"products {rates['burst'] / 1e12:.0f} TFLOP/s alone, {rates['lasting'] / 1e12:.0f} for a second; "
            f"copy {rates['copy'] / 1e12:.2f} TB/s",
            flush=True,
        )
        model = build(config, device)
        found["lengths"] = [table(model, config, device, length, arguments.chunk, rates) for length in lengths]
        del model
        if arguments.tiles:
            deadline = time.monotonic() + arguments.time_limit
            found["tiles"] = list(tiles(config, device, lengths, arguments.chunk, deadline, faults))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "prefill_parts.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    for fault in faults:
        print(f"FAULT {fault}")
    sys.exit(1 if faults else 0)


def attention_kernel(device: torch.device) -> AttentionKernel:
    """The one that is served."""
    if device.type != "cuda":
        return reference_attention
    from gemray_kernels.triton.paged_attention import paged_attention

    return paged_attention


def build(config: ModelConfig, device: torch.device) -> TargetModel:
    """The cut model with random weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = TargetModel(config, SoloCommunicator(), dtype=dtype, device=device, attention=attention_kernel(device))
    random_weights("", model.weight_targets(), prefix="", is_ignored=lambda name: False)
    return model


def measure_rates(config: ModelConfig, device: torch.device, chunk: int) -> dict[str, float]:
    """Operations a second of one product and of a second of the layers' products; bytes a second of a copy."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = config.layers[0]
    shapes = [(2 * layer.intermediate_size, config.hidden_size), (config.hidden_size, layer.intermediate_size)]
    rows = min(chunk, 4096) if device.type == "cuda" else 64
    pairs = [
        (torch.randn(rows, num_in, device=device).to(dtype), torch.randn(num_out, num_in, device=device).to(dtype) / 64)
        for num_out, num_in in shapes
    ]

    def products() -> None:
        for x_TI, weight_OI in pairs:
            torch.nn.functional.linear(x_TI, weight_OI)

    operations = sum(2 * rows * num_out * num_in for num_out, num_in in shapes)
    burst = median_ms(products, device)
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < (1.0 if device.type == "cuda" else 0.05):
        for _ in range(20):
            products()
        rounds += 20
        synchronize(device)
    lasting = (time.perf_counter() - began) / rounds * 1e3
    source = torch.randn(1 << (29 if device.type == "cuda" else 20), device=device)
    target = torch.empty_like(source)
    copied = median_ms(lambda: target.copy_(source), device)
    return {
        "burst": 1e3 * operations / burst,
        "lasting": 1e3 * operations / lasting,
        "copy": 2e3 * source.nbytes / copied,
    }


def median_ms(call: Callable[[], object], device: torch.device) -> float:
    """Time of a call, by events on a card."""
    call()
    times = []
    for _ in range(REPEATS):
        synchronize(device)
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    """Wait for a card."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def chunks_of(length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(rows, rows before them) of each chunk of a prompt."""
    for start in range(0, length, chunk):
        yield min(chunk, length - start), start


def table(
    model: TargetModel, config: ModelConfig, device: torch.device, length: int, chunk: int, rates: dict[str, float]
) -> dict[str, Any]:
    """Time, profile and print the prompt of one length."""
    cache = PagedCache(config, num_sequences=1, max_len=length, dtype=model.dtype, page_size=PAGE_SIZE, device=device)
    ids = torch.randint(0, config.vocab_size, (length,)).tolist()
    batches = [cache.batch([Rows(0, ids[start : start + rows], start)]) for rows, start in chunks_of(length, chunk)]

    def prompt() -> None:
        for batch in batches:
            model.forward(batch, cache.caches)

    whole_ms = median_ms(prompt, device)
    began = time.perf_counter()
    prompt()
    host_ms = 1e3 * (time.perf_counter() - began)
    synchronize(device)
    milliseconds, launches = profiled(prompt, device)
    operations: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for rows, start in chunks_of(length, chunk):
        work = Work.of(config, rows, start, rows)
        operations.update(work.operations)
        moved.update(work.bytes)
    busy = sum(milliseconds.values())
    ideal = 1e3 * operations["products"] / rates["burst"]
    print(
        f"\n{length} tokens: {whole_ms:.2f} ms, {whole_ms / ideal:.2f} x the products' {ideal:.2f} ms; kernels "
        f"{busy:.2f} ms in {sum(launches.values())} launches, the host is done after {host_ms:.2f} ms\n"
    )
    print("| kind | launches | ms | share | at best ms | x best |\n| --- | --- | --- | --- | --- | --- |")
    rows_of_table = []
    for kind, _ in (*KINDS, (OTHERS, ())):
        best = 1e3 * operations[kind] / rates["burst"] + 1e3 * moved[kind] / rates["copy"]
        ms = milliseconds.get(kind, 0.0)
        ratio = f"{ms / best:.2f}" if best else "-"
        print(f"| {kind} | {launches[kind]} | {ms:.3f} | {ms / busy:.1%} | {best:.3f} | {ratio} |", flush=True)
        rows_of_table.append({"kind": kind, "launches": launches[kind], "ms": ms, "best_ms": best})
    return {"length": length, "ms": whole_ms, "host_ms": host_ms, "products_ms": ideal, "kinds": rows_of_table}


def profiled(call: Callable[[], object], device: torch.device) -> tuple[dict[str, float], Counter[str]]:
    """Milliseconds and launches of one call by kind; every kernel of kind `OTHERS` that counts is printed."""
    on_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
        call()
        synchronize(device)
    milliseconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for event in profiler.events() or ():
        if on_cuda and event.device_type.name != "CUDA":
            continue
        span: Any = event
        ms = (span.device_time if on_cuda else span.self_cpu_time_total) / 1e3
        kind = kind_of(event.name)
        milliseconds[kind] += ms
        launches[kind] += 1
        by_name[event.name] += ms
    for name, ms in by_name.most_common(12):
        print(f"    {ms:9.3f} ms  {kind_of(name):<16}  {name[:110]}")
    return dict(milliseconds), launches


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), OTHERS)


def tiles(
    config: ModelConfig,
    device: torch.device,
    lengths: Sequence[int],
    chunk: int,
    deadline: float,
    faults: list[str],
) -> Iterator[dict[str, Any]]:
    """Time each tile on the last chunk of each length, for one layer of each type."""
    from gemray_kernels.triton import paged_attention as module

    by_kind = {layer.kind: layer for layer in config.layers}
    for layer in by_kind.values():
        group = config.num_attention_heads // layer.num_kv_heads
        in_two = module.in_two_kernels(torch.bfloat16, layer.head_dim)
        served = None if in_two else module.long_tile(torch.bfloat16, layer.head_dim, group)
        for length in lengths:
            (*_, (rows, before)) = chunks_of(length, chunk)
            call = attention_call(config, layer, device, rows, before + rows)
            expected = call()
            times: dict[str, float] = {"two kernels (served)": median_ms(call, device)} if in_two else {}
            for pairs, keys, num_warps, num_stages in TILES:
                tile = module.Tile(pairs, keys, num_warps, num_stages)
                if time.monotonic() > deadline and tile != served:
                    continue
                name = f"{pairs}x{keys} w{num_warps} s{num_stages}{' (served)' if tile == served else ''}"
                other = partial(call, long=tile)
                try:
                    wrong = float((other().double() - expected.double()).norm() / expected.double().norm())
                    times[name] = median_ms(other, device)
                except Exception as error:  # a sweep may contain tiles that do not fit
                    print(f"    {name}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
                    continue
                if not wrong < 0.02:
                    faults.append(f"{layer.kind}, {length} tokens, {name}: differs by {wrong:.3g}")
            operations = 4 * config.num_attention_heads * layer.head_dim * _visible(layer, rows, before, rows)
            ranked = sorted(times.items(), key=lambda item: item[1])
            text = ", ".join(f"{name} {ms:.3f} ({operations / ms / 1e9:.0f})" for name, ms in ranked[:8])
            print(f"attention {layer.kind}, {rows} rows, {before + rows} keys, ms (TFLOP/s): {text}", flush=True)
            yield {"kind": layer.kind, "rows": rows, "keys": before + rows, "operations": operations, "ms": times}


def attention_call(
    config: ModelConfig, layer: LayerConfig, device: torch.device, rows: int, keys: int
) -> Callable[..., Tensor]:
    """Attention of one sequence's last `rows` rows over `keys` keys."""
    kernel = attention_kernel(device)
    pages = -(-keys // PAGE_SIZE)
    shape = (1 + pages, PAGE_SIZE, layer.num_kv_heads, layer.head_dim)
    k_pages, v_pages = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    q_TND = torch.randn(rows, config.num_attention_heads, layer.head_dim, device=device).bfloat16()
    q_TND *= 1.5 / layer.head_dim**0.5
    table_SP = (torch.randperm(pages, device=device) + 1).int().view(1, pages)
    start_Z = torch.tensor([0, rows], dtype=torch.int32, device=device)
    kv_len_S = torch.tensor([keys], dtype=torch.int32, device=device)

    return partial(
        kernel,
        q_TND,
        k_pages,
        v_pages,
        table_SP,
        start_Z,
        kv_len_S,
        window=layer.window,
        causal=True,
        scale=1.0,
        most_keys=keys,
    )


if __name__ == "__main__":
    main()
