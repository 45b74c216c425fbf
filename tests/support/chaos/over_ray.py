"""Faults of Ray's own processes, of a rank and of the server under `gemray serve`, with 20 streams.

PYTHONPATH=tests python -m support.chaos.over_ray --output table.md
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from support.chaos.family import answers_alone, requests
from support.chaos.faults import Outcome, all_move, runs, under_way
from support.chaos.report import FaultReport, publish
from support.chaos.serve_over_ray import REPLICAS, ServeOverRay
from support.chaos.server_process import START_S
from support.chaos.streams import Streams
from support.waiting import eventually


async def strike_over_ray(
    server: ServeOverRay,
    streams: Streams,
    name: str,
    victims: Sequence[psutil.Process],
    number: signal.Signals,
    num_gangs: int,
) -> Outcome:
    """Send `number` to `victims`, and wait until so many gangs have failed and serve again."""
    await under_way(streams)
    failed, again = server.count("the gang failed"), server.num_serving_again
    num_live, began = streams.num_begun, time.monotonic()
    for victim in victims:
        victim.send_signal(number)
    await eventually(lambda: server.count("the gang failed") >= failed + num_gangs, START_S)
    detected = time.monotonic()
    await eventually(lambda: server.num_serving_again >= again + num_gangs, START_S)
    serves = time.monotonic()
    await all_move(streams)
    return Outcome(f"{number.name} of {name}", num_live, detected - began, serves - began, streams.take_longest_pause())


async def main(options: argparse.Namespace) -> int:
    """Every fault once; 0 when no request was lost or changed."""
    asked = requests(options.streams, options.max_tokens)
    expected = answers_alone(asked)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = await ServeOverRay.start(options.log, port=port, heartbeat_s=options.heartbeat_s)
    report = FaultReport()
    streams = Streams(server.address, asked, expected)
    try:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            report.tell(await strike_over_ray(server, streams, "a rank", server.ranks()[:1], number, 1), streams)
        for name in ("raylet", "gcs_server"):
            victims = [server.of_ray(name)]
            outcome = await strike_over_ray(server, streams, f"the {name}", victims, signal.SIGKILL, REPLICAS)
            report.tell(outcome, streams)
        await under_way(streams)
        everything, ranks = server.descendants(), server.ranks()
        num_live, began = streams.num_begun, time.monotonic()
        await server.kill()
        await eventually(lambda: not any(map(runs, ranks)), START_S)
        gone = time.monotonic()
        server = await ServeOverRay.start(options.log, port=port, heartbeat_s=options.heartbeat_s)
        serves = time.monotonic()
        await all_move(streams)
        pause = streams.take_longest_pause()
        report.tell(Outcome("SIGKILL of the server", num_live, gone - began, serves - began, pause), streams)
        await streams.end(START_S)
        await eventually(lambda: not any(map(runs, everything)), START_S)
        left = time.monotonic() - began
    finally:
        await streams.cancel()
        await server.kill()
    more = f"The last process of the killed server's Ray was gone at most {left:.0f} s after it."
    publish(report.text(streams, more), streams.wrong, options.output)
    return 1 if streams.wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--heartbeat-s", type=float, default=10.0, help="silence after which a gang counts as hung")
    parser.add_argument("--log", type=Path, default=Path("chaos.log"), help="where the server logs")
    parser.add_argument("--output", type=Path, help="where the table goes, too")
    sys.exit(asyncio.run(main(parser.parse_args())))
