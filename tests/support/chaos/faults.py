"""What happens to processes under load, and what is measured of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import psutil

from support.chaos.server_process import START_S, FamilyServer
from support.chaos.streams import Streams
from support.waiting import eventually


@dataclass(frozen=True)
class Fault:
    """A signal to some ranks of one replica."""

    number: signal.Signals
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """In words."""
        what = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else "a whole gang"
        return f"{self.number.name} of {what}"


def faults_of(num_ranks: int) -> list[Fault]:
    """Each rank alone, then all of them: killed, then stopped."""
    victims = [*((rank,) for rank in range(num_ranks)), tuple(range(num_ranks))]
    return [Fault(number, ranks) for number in (signal.SIGKILL, signal.SIGSTOP) for ranks in victims]


@dataclass(frozen=True)
class Outcome:
    """What one fault did."""

    fault: str
    num_live: int
    """Streams that had begun and not ended when it happened."""
    seconds_to_detect: float
    """From the fault until what it hit no longer counted as serving; for a server, until its ranks were gone."""
    seconds_to_serve: float
    """From the fault until everything served again."""
    longest_pause: float
    """Seconds between two messages of a stream, of the stream that waited longest, from the fault on."""


async def strike(server: FamilyServer, streams: Streams, fault: Fault, replica: int) -> Outcome:
    """Let `fault` happen to a replica while streams run, and wait until it serves again with new processes."""
    whole = set(server.replicas)
    await under_way(streams)
    pids = server.replicas[replica]
    num_live, began = streams.num_begun, time.monotonic()
    for rank in fault.ranks:
        os.kill(pids[rank], fault.number)
    await server.until(lambda: server.replicas.get(replica) != pids)
    detected = time.monotonic()
    await server.until(lambda: set(server.replicas) == whole and server.replicas[replica] != pids)
    serves = time.monotonic()
    await all_move(streams)
    return Outcome(fault.name, num_live, detected - began, serves - began, streams.take_longest_pause())


async def kill_server(
    server: FamilyServer, streams: Streams, start_again: Callable[[], Awaitable[FamilyServer]]
) -> tuple[Outcome, FamilyServer]:
    """Kill the server with SIGKILL while streams run; its ranks must end. Start it again: the streams must go on."""
    await under_way(streams)
    orphans = server.descendants()
    num_live, began = streams.num_begun, time.monotonic()
    await server.kill()
    await eventually(lambda: not any(map(runs, orphans)), START_S)
    gone = time.monotonic()
    another = await start_again()
    serves = time.monotonic()
    await all_move(streams)
    outcome = Outcome("SIGKILL of the server", num_live, gone - began, serves - began, streams.take_longest_pause())
    return outcome, another


def runs(process: psutil.Process) -> bool:
    """Whether a process still does something."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table of Markdown."""
    lines = [
        "| fault | live streams | s to detect | s to serve again | longest pause of a stream, s |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {o.fault} | {o.num_live} | {o.seconds_to_detect:.1f} | {o.seconds_to_serve:.1f} | {o.longest_pause:.1f} |"
        for o in outcomes
    ]
    return "\n".join(lines)


async def under_way(streams: Streams) -> None:
    """Wait until streams run, and count pauses from then on."""
    await eventually(lambda: streams.num_begun * 2 >= len(streams.asked), START_S)
    streams.take_longest_pause()


async def all_move(streams: Streams) -> None:
    """Wait until every stream has got a message since now, so that each pause has ended."""
    now = time.monotonic()
    await eventually(lambda: min(streams.newest.values()) > now, START_S)
    await asyncio.sleep(0)
