"""Every schema under every drafter:

    python -m support.structured [--limit N] [--temperature T ...]

Prints one line a drafter, and the requests that were not as they should be; ends with 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.embedded import embedded_path
from support.structured.schemas import schemas
from support.structured.sweep import DRAFTERS, judge, requests_of, serve


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=None, help="schemas, spread over all kinds")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    every = schemas()
    stride = 1 if arguments.limit is None else max(1, len(every) // arguments.limit)
    chosen = dict(list(every.items())[::stride])
    submits = requests_of(chosen, arguments.temperature)
    tokenizer = ChatTokenizer.from_directory(embedded_path("gemray-tiny"))
    print(f"{len(chosen)} schemas, {len(submits)} requests", flush=True)
    runs = {}
    failures = 0
    for drafter in DRAFTERS:
        began = time.perf_counter()
        runs[drafter] = serve(drafter, submits)
        verdict = judge(drafter, submits, runs[drafter], runs["none"], tokenizer)
        print(
            f"| {drafter} | {verdict.valid} valid | {len(verdict.cut)} cut by their budget | "
            f"{len(verdict.wrong)} wrong | "
            f"{len(verdict.differing)} ids differ from plain decoding | {verdict.num_tokens} tokens | "
            f"{verdict.accepted} of {verdict.drafted} drafts accepted | {time.perf_counter() - began:.0f} s |",
            flush=True,
        )
        for what, names in (("cut", verdict.cut), ("wrong", verdict.wrong), ("differs", verdict.differing)):
            for name in names:
                print(f"  {what}: {name}: {tokenizer.decode(runs[drafter].ids[name])[:160]!r}")
        failures += len(verdict.wrong) + len(verdict.differing)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
