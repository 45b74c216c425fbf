"""Ask 1,000 requests that end in every way, and print what the server and its ranks hold before and after.

PYTHONPATH=tests python -m support.chaos.leaks --output table.md

With ``--over-ray`` under `gemray serve` over a Ray of its own, else over plain processes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from support.chaos.census import TOTALS, Census
from support.chaos.endings import Endings
from support.chaos.family import requests
from support.chaos.report import publish
from support.chaos.serve_over_ray import ServeOverRay, free_port
from support.chaos.server_process import FamilyServer

SETTLE_S = 120.0
"""How long what was cut may take to be noticed and given back."""


async def leaks_of(
    server: FamilyServer | ServeOverRay, count: int, max_tokens: int
) -> tuple[Endings, Census, Census, list[str]]:
    """Ask `count` requests, after some that bring every pool of threads to its size.

    Returns how they ended, what was held before and after, and what has grown, in words.
    """
    asked = requests(20, max_tokens)
    await Endings(server.address, asked, seed=1).run(min(count, 100) // 2)
    before = await _settled(server, None)
    endings = Endings(server.address, asked, seed=2)
    await endings.run(count)
    after = await _settled(server, before)
    return endings, before, after, after.more_than(before)


async def _settled(server: FamilyServer | ServeOverRay, before: Census | None) -> Census:
    """The census once nothing runs and it is no more than `before`, or when `SETTLE_S` are over."""
    until = time.monotonic() + SETTLE_S
    while True:
        census = await server.census()
        quiet = census.requests == census.pages == 0 and census.connections == 1
        if time.monotonic() > until or (quiet and not (before and census.more_than(before))):
            return census
        await asyncio.sleep(0.5)


async def main(options: argparse.Namespace) -> int:
    """0 when nothing has grown."""
    server: FamilyServer | ServeOverRay
    if options.over_ray:
        server = await ServeOverRay.start(options.log, port=free_port(), heartbeat_s=60)
    else:
        server = await FamilyServer.start(options.log, f"--replicas={options.replicas}", f"--ranks={options.ranks}")
    try:
        endings, before, after, grown = await leaks_of(server, options.requests, options.max_tokens)
    finally:
        await server.kill()
    ways = ", ".join(f"{count} {way}" for way, count in sorted(endings.ended.items()))
    text = (
        f"{sum(endings.ended.values())} requests: {ways}; {len(endings.unexpected)} errors of those that were read.\n\n"
        f"| | {TOTALS} |\n|{' --- |' * 9}\n| before | {before.total()} |\n| after | {after.total()} |\n\n"
        f"What has grown: {'; '.join(grown) or 'nothing'}.\n"
    )
    publish(text, endings.unexpected, options.output)
    return 1 if grown or endings.unexpected else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--over-ray", action="store_true", help="two replicas of two ranks under gemray serve")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--log", type=Path, default=Path("leaks.log"), help="where the server logs")
    parser.add_argument("--output", type=Path, help="where the table goes, too")
    sys.exit(asyncio.run(main(parser.parse_args())))
