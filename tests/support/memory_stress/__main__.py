"""``python -m support.memory_stress``: published shapes of random weights with no memory flag, filled to the brim.

Each shape is started as a server would be (default batch, default steps), runs the largest batch twice (as published,
and with everything that a request may ask for) and then the longest context that it advertises. A row says where the
memory went and how little of it was ever free. ``--layers 12`` cuts the shapes for a quick look, ``--seconds`` bounds
the longest context, which on a large card takes minutes.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from support.engine.gpu import memory_config
from support.memory_stress.fill import Filled, fill
from support.processes.gang import GangPools

GIB = 1 << 30
HEADER = (
    "| shape | drafter | TP | rank | weights | drafter | KV | graphs | work | elsewhere | headroom | least free | "
    "longest, of | batch | start |\n|" + " --- |" * 15
)


def main() -> int:
    """Run the shapes, one after the other; 1 when a request met a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="31B,26B-A4B,E4B", help="of benchmarks/configs (default 31B,26B-A4B,E4B)")
    parser.add_argument("--drafters", default="mtp", help="none, mtp or dflash, or several with commas (default mtp)")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--layers", type=int, help="cut the shapes to so many layers (default: all)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each load (default 30)")
    parser.add_argument("--most-context", type=int, help="tokens of the longest context (default: all that fit)")
    parser.add_argument("--utilization", type=float, default=0.9, help="as --gpu-memory-utilization (default 0.9)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    pools, failed = GangPools(), False
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for shape in arguments.shapes.split(","):
            for drafter in arguments.drafters.split(","):
                config = memory_config(
                    shape,
                    drafter,
                    Path(directory),
                    arguments.layers,
                    device=arguments.device,
                    tensor_parallel_size=arguments.tp,
                    gpu_memory_utilization=arguments.utilization,
                )
                ranks = pools.run(arguments.tp, fill, config, arguments.seconds, arguments.most_context)
                for filled in ranks:
                    print(_row(shape, drafter, arguments.tp, filled), flush=True)
                    for fault in filled.faults:
                        failed = True
                        print(f"{shape} {drafter}: {fault}", file=sys.stderr)
    pools.close()
    return failed


def _row(shape: str, drafter: str, tp: int, filled: Filled) -> str:
    memory = filled.memory
    sizes = (
        memory.weights,
        memory.drafter,
        memory.kv,
        memory.graphs,
        memory.work,
        memory.elsewhere,
        memory.headroom,
        filled.least_free,
    )
    gib = " | ".join(f"{size / GIB:.2f}" for size in sizes)
    return (
        f"| {shape} | {drafter} | {tp} | {filled.rank} | {gib} | {filled.longest}, {filled.max_model_len} | "
        f"{filled.batch} | {filled.load_s:.0f} s |"
    )


if __name__ == "__main__":
    sys.exit(main())
