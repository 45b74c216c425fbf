"""``python -m support.random_cases --count 3000 --output FILE``: random cases against plain decoding, as a table."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import get_args

from gemray_workers.config import KVDTypeName, NumericsName
from support.random_cases.case import DRAFTERS
from support.random_cases.sweep import CELLS, Cell, Tally, cells_for, run_task, table

BATCH = 10
"""Cases of one call of a gang."""


def main() -> int:
    """Run the sweep; 1 when anything differed. The table in `--output` is written anew after each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000, help="cases, spread over TP and drafters (default 3000)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--drafter", choices=DRAFTERS, help="cases of this one alone (default all)")
    parser.add_argument("--kv-dtype", choices=get_args(KVDTypeName), default="auto", help="of the target's pages")
    parser.add_argument("--numerics", choices=get_args(NumericsName), default="fast", help="exact: float32, to the bit")
    parser.add_argument("--processes", type=int, default=1, help="calls at one time, each with gangs of its own")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    cells = [
        replace(cell, kv_dtype=arguments.kv_dtype, numerics=arguments.numerics)
        for cell in CELLS
        if arguments.drafter in (None, cell.drafter)
    ]
    tasks = list(_tasks(cells, arguments.count, arguments.first_seed))
    tallies = {cell: Tally() for cell, _ in tasks}
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as executor:
        running = {executor.submit(run_task, cell, seeds): cell for cell, seeds in tasks}
        for done in as_completed(running):
            tallies[running[done]].merge(done.result())
            report(tallies, arguments.output)
    return any(tally.differences for tally in tallies.values())


def _tasks(cells: Sequence[Cell], count: int, first_seed: int) -> Iterator[tuple[Cell, Sequence[int]]]:
    """Small gangs first, so that a process has one pool of ranks at a time."""
    for cell, share in sorted(cells_for(count, cells).items(), key=lambda item: item[0].gang_size):
        for first in range(0, share, BATCH):
            yield cell, range(first_seed + first, first_seed + min(first + BATCH, share))


def report(tallies: dict[Cell, Tally], output: Path) -> None:
    """Write the table and every difference."""
    different = [f"- {difference}" for tally in tallies.values() for difference in tally.differences]
    output.write_text("\n".join([*table(tallies), "", *different]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
