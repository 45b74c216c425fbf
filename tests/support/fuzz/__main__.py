"""``python -m support.fuzz --count 100000 --output FILE``: random and mutated requests on the handlers, as a table."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import resource
import sys
import time
from pathlib import Path

from support.fuzz.handlers import Handlers, Tally, sweep

ROUND = 5_000
"""Requests of a seed; each begins from the corpus, and the report is written after each."""


def main() -> int:
    """Run the sweep; 1 when a request ended as none may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    began = time.perf_counter()
    handlers = Handlers()
    found = Tally()
    with asyncio.Runner() as runner:
        for seed in itertools.count(arguments.seed):
            found.merge(runner.run(sweep(handlers, seed, min(ROUND, arguments.count - found.count))))
            seconds = time.perf_counter() - began
            arguments.output.write_text(report(found, range(arguments.seed, seed + 1), seconds), encoding="utf-8")
            if found.count >= arguments.count:
                break
    handlers.close()
    return bool(found.faults)


def report(tally: Tally, seeds: range, seconds: float) -> str:
    """Statuses by call, the fields that were refused, and every fault."""
    statuses = sorted({status for _, status in tally.ended})
    rows = [f"| call | {' | '.join(statuses)} |", "| --- " * (len(statuses) + 1) + "|"]
    for call in sorted({call for call, _ in tally.ended}):
        rows.append(f"| {call} | {' | '.join(str(tally.ended[call, status]) for status in statuses)} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    refused = ", ".join(f"`{name}` {count}" for name, count in tally.fields.most_common())
    return "\n".join(
        [
            f"{tally.count} requests from the seeds {seeds[0]} to {seeds[-1]} in {seconds:.0f} s; the slowest took "
            f"{tally.slowest[0]:.2f} s; at most {peak} MiB resident; {len(tally.faults)} faults.",
            "", *rows, "", f"Refused fields: {refused}.", "", *(f"- {fault}" for fault in tally.faults), "",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
