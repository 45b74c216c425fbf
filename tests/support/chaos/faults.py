"""What happens to processes under load, and what is measured of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
    seconds_to_detect: float | None
    """From the fault until what it hit no longer counted as serving; for a server, until its ranks were gone.

    None where everything went on serving."""
    seconds_to_serve: float | None
    """From the fault until everything served again."""
    longest_pause: float
    """Seconds between two messages of a stream, of the stream that waited longest, from the fault on."""

    @property
    def line(self) -> str:
        """The row of a table of Markdown."""
        detect, serve = (
            "-" if seconds is None else f"{seconds:.1f}" for seconds in (self.seconds_to_detect, self.seconds_to_serve)
        )
        return f"| {self.fault} | {self.num_live} | {detect} | {serve} | {self.longest_pause:.1f} |"


HEADINGS = (
    "| fault | live streams | s to detect | s to serve again | longest pause of a stream, s |",
    "| --- | --- | --- | --- | --- |",
)


async def strike(server: FamilyServer, streams: Streams, faults: Mapping[int, Fault]) -> Outcome:
    """Let faults happen to replicas at once while streams run, and wait until all serve again with new processes.

    `faults`: by the replica's index.
    """
    await under_way(streams)
    before = dict(server.replicas)
    num_live, began = streams.num_begun, time.monotonic()
    for replica, fault in faults.items():
        for rank in fault.ranks:
            os.kill(before[replica][rank], fault.number)
    await server.until(lambda: all(server.replicas.get(replica) != before[replica] for replica in faults))
    detected = time.monotonic()
    await server.until(
        lambda: (
            server.replicas.keys() == before.keys()
            and all(server.replicas[replica] != before[replica] for replica in faults)
        )
    )
    serves = time.monotonic()
    await all_move(streams)
    name = " and ".join(fault.name for fault in faults.values())
    return Outcome(name, num_live, detected - began, serves - began, streams.take_longest_pause())


async def kill_server(
    server: FamilyServer,
    streams: Streams,
    start_again: Callable[[], Awaitable[FamilyServer]],
    *,
    stopped_s: float = 0.0,
) -> tuple[Outcome, FamilyServer]:
    """Kill the server with SIGKILL while streams run; its ranks must end. Start it again: the streams must go on.

    With `stopped_s` it is stopped (SIGSTOP) for so long before, as a server is that a liveness probe gives up.
    """
    await under_way(streams)
    orphans = server.descendants()
    num_live, began = streams.num_begun, time.monotonic()
    if stopped_s:
        server.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(stopped_s)
    await server.kill()
    await eventually(lambda: not any(map(runs, orphans)), START_S)
    gone = time.monotonic()
    another = await start_again()
    serves = time.monotonic()
    await all_move(streams)
    name = f"SIGSTOP of the server, SIGKILL {stopped_s:g} s later" if stopped_s else "SIGKILL of the server"
    outcome = Outcome(name, num_live, gone - began, serves - began, streams.take_longest_pause())
    return outcome, another


def runs(process: psutil.Process) -> bool:
    """Whether a process still does something."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table of Markdown."""
    return "\n".join([*HEADINGS, *(outcome.line for outcome in outcomes)])


async def under_way(streams: Streams) -> None:
    """Wait until streams run, and count pauses from then on."""
    await eventually(lambda: streams.num_begun * 2 >= len(streams.asked), START_S)
    streams.take_longest_pause()


async def all_move(streams: Streams) -> None:
    """Wait until every stream has got a message since now, so that each pause has ended."""
    now = time.monotonic()
    await eventually(lambda: min(streams.newest.values()) > now, START_S)
    await asyncio.sleep(0)
