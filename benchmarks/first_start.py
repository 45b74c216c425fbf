"""Times a first start, with an empty cache of programs, with and without compiling ahead.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python -m first_start [--shapes 31B,26B-A4B] [--layers 8]

Each line is one start of a process of its own: a published shape cut to a few layers (the programs are those of all of
them), random weights. `ahead` is what compiling ahead took, rehearsal included, `later` the graphs and the warm-up
behind it; then how many programs were compiled ahead and how many at their first launch all the same, whose kernels
are named, and how many while it served. `again` starts with the cache that the start before it left. Starts of a shape
must give the same ids; the run ends with 1 where they do not, where serving compiles, or where a tensor of a rehearsal
is still alive behind it. Starts without it run beside each other and beside those with it, on one core each.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.compile_ahead import compile_ahead
from gemray_workers.rank.target_rank import EngineRank
from support.engine.engine_runner import request
from support.engine.gpu import memory_config

SEQUENCES = 16
KV_BYTES = 2 << 30


@contextmanager
def compiled_kernels() -> Iterator[Counter[str]]:
    """The kernels that are compiled meanwhile, and not found in the cache on disk."""
    from triton import knobs

    names: Counter[str] = Counter()

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            names[src.name] += 1

    knobs.compilation.listener = listener
    try:
        yield names
    finally:
        knobs.compilation.listener = None


def start(shape: str, method: str, numerics: str, layers: int, ahead: bool) -> dict[str, Any]:
    """One start in this process."""
    with tempfile.TemporaryDirectory() as directory:
        config = memory_config(
            shape,
            method,
            Path(directory),
            layers,
            numerics=numerics,
            kv_memory_bytes=KV_BYTES,
            max_model_len=4096,
            max_num_seqs=SEQUENCES,
        )
        rank = EngineRank(config, SoloCommunicator(), torch.device("cuda", 0))
        with compiled_kernels() as early:
            started = time.perf_counter()
            if ahead:
                compile_ahead(rank.rehearsal(), ranks_here=1)
            ahead_s = time.perf_counter() - started
        gc.collect()
        left = sum(type(o).__name__ == "FakeTensor" for o in gc.get_objects())
        with compiled_kernels() as late:
            started = time.perf_counter()
            rank.warm_up()
            torch.cuda.synchronize()
            later_s = time.perf_counter() - started
        with compiled_kernels() as served:
            submits = [request(str(i), [2, 5 + i, 7] * (1 + 20 * i), 24, seed=i) for i in range(12)]
            sampled = {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
            submits += [request(f"sampled {i}", [2, 9 + i], 24, seed=i, **sampled) for i in range(4)]
            inbox = LocalInbox(submits)
            rank.engine(inbox).run()
    ids = {submit.request_id: [t for d in inbox.deltas if d.request_id == submit.request_id for t in d.token_ids]
           for submit in submits}  # fmt: skip
    return {
        "ahead_s": ahead_s,
        "later_s": later_s,
        "num_ahead": early.total(),
        "late": dict(late),
        "served": dict(served),
        "left": left,
        "ids": ids,
    }


def begin(args: argparse.Namespace, shape: str, ahead: bool, cache: str) -> subprocess.Popen[str]:
    """A start in a process of its own."""
    command = [sys.executable, "-m", "first_start", "--one", shape, "--layers", str(args.layers)]
    command += ["--numerics", args.numerics, "--method", args.method] + (["--ahead"] if ahead else [])
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str], shape: str, how: str) -> dict[str, Any] | None:
    """Wait for it and print its line."""
    output, _ = process.communicate()
    if process.returncode:
        print(f"{shape} {how}: ended with {process.returncode}", flush=True)
        return None
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    print(
        f"{shape} {how}: ahead {found['ahead_s']:.1f} s, later {found['later_s']:.1f} s, compiled {found['num_ahead']} "
        f"ahead, {sum(found['late'].values())} at their first launch {found['late']}, {found['served']} while it "
        f"served, {found['left']} tensors of a rehearsal left",
        flush=True,
    )
    return found


def main() -> None:
    """Start all shapes and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="31B,26B-A4B")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--numerics", default="fast")
    parser.add_argument("--method", default="none")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--ahead", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
        print(json.dumps(start(args.one, args.method, args.numerics, args.layers, args.ahead)))
        return
    sound = True
    with tempfile.TemporaryDirectory() as caches:
        shapes = args.shapes.split(",")
        without = {shape: begin(args, shape, False, f"{caches}/{shape}-without") for shape in shapes}
        for shape in shapes:
            cache = f"{caches}/{shape}"
            runs = [end(begin(args, shape, True, cache), shape, how) for how in ("ahead", "again")]
            runs.append(end(without[shape], shape, "without"))
            found = [run for run in runs if run is not None]
            same = len(found) == len(runs) and all(run["ids"] == found[0]["ids"] for run in found)
            clean = not any(run["served"] or run["left"] for run in found)
            print(f"{shape}: ids {'equal' if same else 'DIFFER'}", flush=True)
            sound = sound and same and clean
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
