"""Times layers of whole models whose weights are packed, with other tiles of one product after the other.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python -m packed_kernels.layer_tiles --out results \
        [--models E4B-it-w4a16,26B-A4B-it-w8a16] [--only "2560 x 10240,gated"] [--limit 80]

A model is cut to layers of each kind whose weights exceed the cache together, and its passes are captured as graphs;
every time is the median of replays, in microseconds of all of its layers. Product by product the tiles are tried at one
row and eight: first two tiles with every number of parts, then all tiles with the best number, as parts take the
norms behind them time, too. The tile with the least sum of both times stays for the products that follow. In the end
layers with all chosen tiles are timed beside those with the served ones, in turn, at up to 64 rows. Programs are
compiled in several processes first.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import triton

from decode_kernels.measure import DEVICE, random
from gemray_kernels.triton.paged_attention import paged_attention
from gemray_workers.checkpoint.random_weights import random_weights
from gemray_workers.execution.programs_ahead import compile_side_by_side, noted_programs
from gemray_workers.model.batch import ForwardBatch
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import SoloCommunicator
from packed_kernels.chosen_tiles import Choice, Product, Tiles, chosen_tiles, served_products
from packed_kernels.layer_candidates import candidates, first_candidates
from support.oracles.paged import PagedCache, Rows

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = ("E4B-it-w4a16", "E2B-it-w4a16", "26B-A4B-it-w4a16", "26B-A4B-it-w8a16")
ROWS = (1, 8)
ALL_ROWS = (1, 2, 4, 8, 16, 32, 64)
KEYS = 640
VOCABULARY = 4096
SLIDING, FULL = "sliding_attention", "full_attention"
PROCESSES = 14
LEAST_GAIN_US = 0.4
"""Time of all layers together; less is within the repetition of a time."""
REPLAYS = 11
FEW_EXPERTS = 8
"""For compiling: programs do not know how many there are."""


class Model:
    """A few layers of a published model with random weights, and batches of decode or verify rows over them."""

    def __init__(self, name: str, num_experts: int | None = None) -> None:
        """The model, on the card; with so many experts, or all."""
        self.name = name
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(shortened(name, num_experts)))
            config = ModelConfig.from_directory(Path(directory))
        self.num_layers = len(config.layers)
        self._model = TargetModel(
            config, SoloCommunicator(), dtype=torch.bfloat16, device=DEVICE, attention=paged_attention
        )
        random_weights("", self._model.weight_targets(), prefix="", is_ignored=lambda name: False)
        self._cache = PagedCache(
            config, num_sequences=max(ALL_ROWS), max_len=KEYS + 16, dtype=torch.bfloat16, page_size=16, device=DEVICE
        )
        for spec in self._cache.caches._readers.values():
            spec.k_pages.copy_(random(*spec.k_pages.shape))
            spec.v_pages.copy_(random(*spec.v_pages.shape))
        self._pool = torch.cuda.graph_pool_handle()
        self._first_graph: torch.cuda.CUDAGraph | None = None
        self._batches = {(rows, 1): self._batch(rows, 1) for rows in ALL_ROWS}

    def _batch(self, sequences: int, rows: int) -> ForwardBatch:
        generator = torch.Generator().manual_seed(sequences)
        ids = torch.randint(0, VOCABULARY, (sequences, rows), generator=generator).tolist()
        batch = self._cache.batch([Rows(s, tokens, KEYS) for s, tokens in enumerate(ids)])
        return replace(batch, most_rows=min(sequences, 32) if rows == 1 else rows)

    def hidden(self, sequences: int, rows: int = 1) -> torch.Tensor:
        """What comes out of the layers; at most 16 rows of a sequence."""
        if (sequences, rows) not in self._batches:
            self._batches[sequences, rows] = self._batch(sequences, rows)
        return self._model.forward(self._batches[sequences, rows], self._cache.caches).hidden_UH

    def us(self, sequences: int, rows: int = 1) -> float:
        """Microseconds of a pass of so many sequences of one row each, or several."""
        self.hidden(sequences, rows)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):  # which gives nothing back that is cached: there are hundreds of captures
            graph.capture_begin(pool=self._pool)
            self.hidden(sequences, rows)
            graph.capture_end()
        self._first_graph = self._first_graph or graph  # which keeps the memory that all graphs share
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000)
        return statistics.median(times)


def shortened(name: str, num_experts: int | None) -> dict[str, object]:
    """The model's configuration with a layer of each kind, or two, a small vocabulary, and so many experts, or all."""
    config: dict[str, object] = json.loads((CONFIGS / name / "config.json").read_text())
    text = dict(config["text_config"])  # type: ignore[call-overload]
    shared = text["num_kv_shared_layers"] > 0
    kinds = [SLIDING, FULL] * 2 if shared else [SLIDING, SLIDING, FULL]
    text |= {
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "num_kv_shared_layers": 2 if shared else 0,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_experts": text["num_experts"] and (num_experts or text["num_experts"]),
    }
    return config | {"text_config": text}


def timed_products(model: Model, only: Sequence[str]) -> list[Product]:
    """Products whose name contains one of these words."""
    return [product for product in served_products(model.hidden) if any(word in str(product) for word in only)]


def compile_share(names: Sequence[str], only: Sequence[str], number: int, markers: Path) -> None:
    """Note what all choices would launch, and compile one process's share of it, model by model.

    Args:
        names: of the models.
        only: words of the products' names.
        number: of the process.
        markers: a folder that has a file for each process and model that is done.
    """
    ends: list[int] = []
    with noted_programs() as programs:
        for name in names:
            note(name, only)
            ends.append(len(programs))
    for name, begin, end in zip(names, [0, *ends], ends, strict=False):
        result = compile_side_by_side(programs[begin:end][number::PROCESSES], 1)
        for failure in result.failures:
            print("refused", failure[:200], flush=True)
        Path(markers, f"{name} {number}").touch()


def note(name: str, only: Sequence[str]) -> None:
    """Launch what a model's choices do."""
    model = Model(name, FEW_EXPERTS)
    for rows in ALL_ROWS:
        model.hidden(rows)
    for product, choice in [(p, choice) for p in timed_products(model, only) for choice in candidates(p)]:
        # The readers of parts, and experts, have other programs for other rows.
        differ = product.kind != "summands" or choice in set(first_candidates(product))
        for rows in ROWS if differ else ROWS[-1:]:
            try:
                with chosen_tiles({product: choice}):
                    model.hidden(rows)
            except Exception as reason:
                print("refused", product, choice, str(reason)[:100], flush=True)


@contextmanager
def compiling(names: Sequence[str], only: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Compile in several processes, so that programs lie in the cache on disk; gives what waits for a model's."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "packed_kernels.layer_tiles",
            "--models",
            ",".join(names),
            "--only",
            ",".join(only),
        ]
        processes = [
            subprocess.Popen(["nice", *command, "--compile", str(number), "--markers", directory])
            for number in range(PROCESSES)
        ]

        def wait(name: str) -> None:
            while len(list(Path(directory).glob(f"{name} *"))) < PROCESSES:
                if all(process.poll() is not None for process in processes):
                    return
                time.sleep(0.2)

        try:
            yield wait
        finally:
            for process in processes:
                process.terminate()
                process.wait()


class Sweep:
    """The choices for one model so far."""

    def __init__(self, model: Model, until: float) -> None:
        """None yet."""
        self._model = model
        self._until = until
        self.tiles: Tiles = {}
        self.found: dict[str, dict[str, list[float]]] = {}

    def _times(self, product: Product, choice: Choice | None) -> list[float]:
        with chosen_tiles(self.tiles if choice is None else {**self.tiles, product: choice}):
            return [self._model.us(rows) for rows in ROWS]

    def choose(self, product: Product) -> None:
        """Try the tiles of one product, and keep the best where it gains."""
        base = self._times(product, None)
        times: dict[Choice, list[float]] = {}

        def measure(choices: Sequence[Choice]) -> None:
            for choice in choices:
                if choice not in times and time.monotonic() < self._until:
                    try:
                        times[choice] = self._times(product, choice)
                    except Exception as reason:
                        print("refused", product, choice, str(reason)[:100], flush=True)

        def ordered() -> list[Choice]:
            return sorted(times, key=lambda choice: sum(times[choice]))

        measure(list(first_candidates(product)))
        parts = {choice.splits for choice in ordered()[:1]} or {1}
        measure([choice for choice in candidates(product) if choice.splits in parts])
        again = self._times(product, None)
        base = [min(pair) for pair in zip(base, again, strict=True)]
        best = ordered()[:1]
        if best and sum(times[best[0]]) < sum(base) - LEAST_GAIN_US:
            self.tiles[product] = best[0]
        self.found[str(product)] = {"served": base} | {str(choice): us for choice, us in times.items()}
        cells = (
            f"{choice} " + " ".join(f"{us - was:+.1f}" for us, was in zip(times[choice], base, strict=True))
            for choice in ordered()[:9]
        )
        print(f"  {product}: {' '.join(f'{us:.1f}' for us in base)}; " + ", ".join(cells), flush=True)

    def compare(self) -> dict[str, object]:
        """Served and chosen tiles in turn."""
        rows_of: dict[str, list[float]] = {}
        for rows in ALL_ROWS:
            if time.monotonic() > self._until + 6:
                break
            times: list[list[float]] = [[], []]
            expected = self._model.hidden(rows).double()
            with chosen_tiles(self.tiles):
                wrong = float((self._model.hidden(rows).double() - expected).norm() / expected.norm())
            for turn in (0, 1, 0, 1):
                with chosen_tiles(self.tiles if turn else {}):
                    times[turn].append(self._model.us(rows))
            rows_of[str(rows)] = [*times[0], *times[1], wrong]
            print(
                f"  {rows} rows: served {times[0][0]:.1f} {times[0][1]:.1f}, chosen {times[1][0]:.1f} "
                f"{times[1][1]:.1f} (differs by {wrong:.4f})",
                flush=True,
            )
        chosen = {str(product): str(choice) for product, choice in self.tiles.items()}
        return {"layers": self._model.num_layers, "chosen": chosen, "rows": rows_of, "products": self.found}


def busiest(model: Model, rows: int) -> str:
    """Kernels of a pass by their own time: how many, and microseconds of each."""
    model.hidden(rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            model.hidden(rows)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    cells = (
        f"{event.count / 5:g} x {event.key[:40]} {event.self_device_time_total / event.count:.1f}"
        for event in events[:16]
    )
    return ", ".join(cells)


def main() -> None:
    """Measure every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--only", default="", help="products whose name has one of these words, as they are printed")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further tile is tried")
    parser.add_argument("--out", type=Path, help="a file for all numbers")
    parser.add_argument("--compile", type=int, help="compile this process's share of the programs and end")
    parser.add_argument("--markers", type=Path, help="where it says what is done")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    names, only = arguments.models.split(","), arguments.only.split(",")
    if arguments.compile is not None:
        compile_share(names, only, arguments.compile, arguments.markers)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    with compiling(names, only) as wait:
        measure(names, only, wait, arguments.limit, arguments.out)


def measure(
    names: Sequence[str], only: Sequence[str], wait: Callable[[str], None], limit: float, out: Path | None
) -> None:
    """Measure each model once its programs are there, and write what was found after each."""
    started = time.monotonic()
    results = {}
    models = {name: Model(name) for name in names}
    for done, name in enumerate(names):
        wait(name)
        now = time.monotonic() - started
        print(f"-- compiled for {name}: {now:.0f} s", flush=True)
        model = models.pop(name)
        until = started + now + (limit - now) / (len(names) - done)
        gc.collect()
        gc.freeze()  # a capture collects
        print(f"{name}, {model.num_layers} layers", flush=True)
        sweep = Sweep(model, until)
        for product in timed_products(model, only):
            sweep.choose(product)
        results[name] = sweep.compare()
        print(f"  kernels of one row: {busiest(model, 1)}", flush=True)
        print(f"-- {name}: {time.monotonic() - started:.0f} s", flush=True)
        if out:
            out.write_text(json.dumps(results, indent=1))
        del model, sweep
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
