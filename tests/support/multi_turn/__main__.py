"""``python -m support.multi_turn --count 510 --output FILE``: random chats with and without the cache, as a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from support.multi_turn.case import DRAFTERS
from support.multi_turn.sweep import Tally, run_seeds, table

BATCH = 10


def main() -> int:
    """Run the sweep; 1 when anything differed. The table in `--output` is written anew after each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=510, help="cases, spread over drafters (default 510)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    tallies = {drafter: Tally() for drafter in DRAFTERS}
    end = arguments.first_seed + -(-arguments.count // len(DRAFTERS))
    for first in range(arguments.first_seed, end, BATCH):
        for drafter, tally in tallies.items():
            tally.merge(run_seeds(drafter, range(first, min(first + BATCH, end))))
            different = [f"- {difference}" for each in tallies.values() for difference in each.differences]
            arguments.output.write_text("\n".join([*table(tallies), "", *different]) + "\n")
    return any(tally.differences for tally in tallies.values())


if __name__ == "__main__":
    sys.exit(main())
