"""``python -m support.quantized_family --output FILE``: `gemray-tiny` in every format, as a table.

With ``--caches`` it is as it is on disk, over KV pages of each dtype. With ``--checkpoints DIR`` nothing is measured:
the checkpoints are kept, to serve them (``gemray serve --model DIR/gemray-tiny-nvfp4``).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from support.checkpoints.quantized import FormatName
from support.quantized_family.measure import CACHES, Measured, keep, measure, table, table_of_caches


def main() -> int:
    """Measure every format, or every cache; 1 when ids with a drafter differed from those without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=415, help="held-out prompts for the loss (default all, 415)")
    parser.add_argument("--requests", type=int, default=24, help="requests for acceptance (default 24)")
    parser.add_argument("--caches", action="store_true", help="measure plain weights over every cache")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--output", type=Path, help="the file that the table goes to")
    target.add_argument("--checkpoints", type=Path, metavar="DIR", help="where to keep a checkpoint of each format")
    arguments = parser.parse_args()
    if arguments.checkpoints is not None:
        for name in get_args(FormatName):
            print(keep(name, arguments.checkpoints))
        return 0
    counts = {"num_prompts": arguments.prompts, "num_requests": arguments.requests}
    if arguments.caches:
        caches = {}
        for dtype, kv_dtype in CACHES:
            caches[dtype, kv_dtype] = measure(None, kv_dtype=kv_dtype, dtype=dtype, **counts)
            arguments.output.write_text("\n".join(table_of_caches(caches)) + "\n")
        return any(row.ids_differ for row in caches.values())
    found: list[Measured] = []
    for name in (None, *get_args(FormatName)):
        found.append(measure(name, **counts))
        arguments.output.write_text("\n".join(table(found)) + "\n")
    return any(row.ids_differ for row in found)


if __name__ == "__main__":
    sys.exit(main())
