"""``python -m support.fuzz --count 100000 --output FILE``: random and mutated requests on the handlers, as a table.

FILE.json keeps what was found: a sweep that was stopped goes on from there, up to the count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from support.fuzz.handlers import Handlers, Tally, sweep

ROUND = 2_000
"""Requests of a seed; each begins from the corpus, and the report is written after each."""


@dataclass
class Sweep:
    """What the rounds so far have found."""

    tally: Tally = field(default_factory=Tally)
    num_rounds: int = 0
    seconds: float = 0.0
    peak_mib: int = 0

    @classmethod
    def load(cls, file: Path) -> Sweep:
        """A sweep as it was stopped, or a new one."""
        if not file.exists():
            return cls()
        kept = json.loads(file.read_text(encoding="utf-8"))
        ended = Counter({(call, status): count for call, status, count in kept.pop("ended")})
        tally = Tally(ended, Counter(kept.pop("fields")), kept.pop("faults"), tuple(kept.pop("slowest")))
        return cls(tally, **kept)

    def save(self, file: Path) -> None:
        """Keep it for `load`."""
        tally = self.tally
        kept = {
            "num_rounds": self.num_rounds, "seconds": self.seconds, "peak_mib": self.peak_mib,
            "ended": [[*key, count] for key, count in tally.ended.items()], "fields": tally.fields,
            "faults": tally.faults, "slowest": tally.slowest,
        }  # fmt: skip
        file.write_text(json.dumps(kept), encoding="utf-8")


def main() -> int:
    """Run the sweep; 1 when a request ended as none may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the others count from it")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    state = arguments.output.with_suffix(".json")
    found = Sweep.load(state)
    handlers = Handlers()
    with asyncio.Runner() as runner:
        while (left := arguments.count - found.tally.count) > 0:
            began = time.perf_counter()
            found.tally.merge(runner.run(sweep(handlers, arguments.seed + found.num_rounds, min(ROUND, left))))
            found.num_rounds += 1
            found.seconds += time.perf_counter() - began
            found.peak_mib = max(found.peak_mib, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
            found.save(state)
            arguments.output.write_text(report(found, arguments.seed), encoding="utf-8")
    handlers.close()
    return bool(found.tally.faults)


def report(found: Sweep, seed: int) -> str:
    """Statuses by call, the fields that were refused, and every fault."""
    tally = found.tally
    statuses = sorted({status for _, status in tally.ended})
    rows = [f"| call | {' | '.join(statuses)} |", "| --- " * (len(statuses) + 1) + "|"]
    for call in sorted({call for call, _ in tally.ended}):
        rows.append(f"| {call} | {' | '.join(str(tally.ended[call, status]) for status in statuses)} |")
    refused = ", ".join(f"`{name}` {count}" for name, count in tally.fields.most_common())
    return "\n".join(
        [
            f"{tally.count} requests (seeds {seed}..{seed + found.num_rounds - 1}) in {found.seconds:.0f} s; slowest "
            f"{tally.slowest[0]:.2f} s; at most {found.peak_mib} MiB resident; {len(tally.faults)} faults.",
            "", *rows, "", f"Refused fields: {refused}.", "", *(f"- {fault}" for fault in tally.faults), "",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
