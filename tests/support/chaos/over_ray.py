"""Faults of Ray's own processes, of a rank and of the server under `gemray serve`, with 20 streams.

PYTHONPATH=tests python -m support.chaos.over_ray --output table.md
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from support.chaos.family import answers_alone, requests
from support.chaos.faults import Outcome, all_move, runs, under_way
from support.chaos.report import FaultReport, publish
from support.chaos.serve_over_ray import REPLICAS, ServeOverRay, free_port
from support.chaos.server_process import START_S
from support.chaos.streams import Streams
from support.waiting import eventually

Victim = Literal["rank", "raylet", "gcs_server"]


@dataclass(frozen=True)
class RayFault:
    """Signals, one after the other, and how many gangs fail of it."""

    name: str
    signals: tuple[tuple[signal.Signals, Victim], ...]
    num_gangs: int


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
A_RANK_KILLED = RayFault("SIGKILL of a rank", ((KILL, "rank"),), 1)
RAYLET_KILLED = RayFault("SIGKILL of the raylet", ((KILL, "raylet"),), REPLICAS)
RAYLET_STOPPED = RayFault("SIGSTOP of the raylet", ((STOP, "raylet"),), REPLICAS)
# What is served needs no GCS; what is to be rebuilt does, for which another Ray takes the place of the first.
GCS_STOPPED = RayFault("SIGSTOP of the GCS, then SIGKILL of a rank", ((STOP, "gcs_server"), (KILL, "rank")), REPLICAS)
FAULTS = [
    A_RANK_KILLED,
    RayFault("SIGSTOP of a rank", ((STOP, "rank"),), 1),
    RAYLET_KILLED,
    RayFault("SIGKILL of the GCS", ((KILL, "gcs_server"),), REPLICAS),
    RAYLET_STOPPED,
    GCS_STOPPED,
]


async def strike_over_ray(server: ServeOverRay, streams: Streams, fault: RayFault) -> Outcome:
    """Let `fault` happen while streams run, and wait until as many gangs as fail of it have failed and serve again."""
    await under_way(streams)
    failed, again = server.count("the gang failed"), server.num_serving_again
    num_live, began = streams.num_begun, time.monotonic()
    for number, victim in fault.signals:
        (server.ranks()[0] if victim == "rank" else server.of_ray(victim)).send_signal(number)
    await eventually(lambda: server.count("the gang failed") >= failed + fault.num_gangs, START_S)
    detected = time.monotonic()
    await eventually(lambda: server.num_serving_again >= again + fault.num_gangs, START_S)
    serves = time.monotonic()
    await all_move(streams)
    return Outcome(fault.name, num_live, detected - began, serves - began, streams.take_longest_pause())


SERVER = "SIGKILL of the server"


async def kill_server(
    server: ServeOverRay, streams: Streams, start_again: Callable[[], Awaitable[ServeOverRay]]
) -> tuple[Outcome, ServeOverRay, str]:
    """Kill the server under streams, and start another at its port; its outcome, the other one, and which process of
    the killed one's Ray went last, as far as anybody looked."""
    await under_way(streams)
    everything, ranks = {process: process.name() for process in server.descendants()}, server.ranks()
    num_live, began = streams.num_begun, time.monotonic()
    await server.kill()
    ends: dict[str, float] = {}
    watching = asyncio.create_task(_watch_ends(everything, ends))
    await eventually(lambda: not any(map(runs, ranks)), START_S)
    gone = time.monotonic()
    another = await start_again()
    serves = time.monotonic()
    await all_move(streams)
    outcome = Outcome(SERVER, num_live, gone - began, serves - began, streams.take_longest_pause())
    await watching
    last = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in sorted(ends.items(), key=lambda end: end[1]))
    return outcome, another, f"Processes of the killed server's Ray were gone after: {last}."


async def _watch_ends(processes: Mapping[psutil.Process, str], ends: dict[str, float]) -> None:
    """Note in `ends` when the last process of each name was gone."""
    began, left = time.monotonic(), dict(processes)
    while left and time.monotonic() < began + START_S:
        for process in [process for process in left if not runs(process)]:
            ends[left.pop(process)] = time.monotonic() - began
        await asyncio.sleep(0.2)
    ends |= dict.fromkeys(left.values(), float("inf"))


async def main(options: argparse.Namespace) -> int:
    """Every fault that was asked for once; 0 when no request was lost or changed."""
    asked = requests(options.streams, options.max_tokens)
    expected = answers_alone(asked)
    port, more = free_port(), ""

    async def start() -> ServeOverRay:
        return await ServeOverRay.start(options.log, port=port, heartbeat_s=options.heartbeat_s)

    server = await start()
    report = FaultReport()
    streams = Streams(server.address, asked, expected)
    try:
        for fault in FAULTS:
            if fault.name in options.fault:
                report.tell(await strike_over_ray(server, streams, fault), streams)
        if SERVER in options.fault:
            outcome, server, more = await kill_server(server, streams, start)
            report.tell(outcome, streams)
        await streams.end(START_S)
    finally:
        await streams.cancel()
        await server.kill()
    publish(report.text(streams, more), streams.wrong, options.output)
    return 1 if streams.wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    every = [*(fault.name for fault in FAULTS), SERVER]
    parser.add_argument("--fault", action="append", choices=every, help="one of them (default: all)")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--heartbeat-s", type=float, default=10.0, help="silence after which a gang counts as hung")
    parser.add_argument("--log", type=Path, default=Path("chaos.log"), help="where the server logs")
    parser.add_argument("--output", type=Path, help="where the table goes, too")
    arguments = parser.parse_args()
    arguments.fault = arguments.fault or every
    sys.exit(asyncio.run(main(arguments)))
