"""``python -m support.multi_turn --count 510 --output FILE``: random chats with and without the cache, as a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from support.multi_turn.case import DRAFTERS
from support.multi_turn.sweep import Tally, run_seeds, table
from support.processes.gang import GangPools

BATCH = 10


def main() -> int:
    """Run the sweep; 1 when anything differed. The table in `--output` is written anew after each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=510, help="cases, spread over drafters (default 510)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1, help="ranks (default 1)")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    tallies = {drafter: Tally() for drafter in DRAFTERS}
    end = arguments.first_seed + -(-arguments.count // len(DRAFTERS))
    pools = GangPools()
    run_on_gang = None if arguments.tp == 1 else pools.run
    for first in range(arguments.first_seed, end, BATCH):
        for drafter, tally in tallies.items():
            seeds = range(first, min(first + BATCH, end))
            tally.merge(run_seeds(drafter, seeds, tp=arguments.tp, run_on_gang=run_on_gang))
            different = [f"- {difference}" for each in tallies.values() for difference in each.differences]
            arguments.output.write_text("\n".join([*table(tallies), "", *different]) + "\n")
    pools.close()
    return any(tally.differences for tally in tallies.values())


if __name__ == "__main__":
    sys.exit(main())
