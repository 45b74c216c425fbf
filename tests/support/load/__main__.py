"""``python -m support.load --output FILE``: a load on `gemray serve` with the embedded family, and what it did."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil

from gemray.client import AsyncClient
from gemray.v1 import generation_pb2 as pb
from gemray_workers.embedded import embedded_path
from support.cluster.serve_process import line_with, ranks_of, starting
from support.load.client import Outcome, Plan, run_load
from support.load.memory import MemoryOverTime, watched_memory

PARTS = 10
MOST_GROWTH_MIB = 24.0
"""Between the third tenth of the run and the last: arenas of the allocator come and go by as much."""


def main() -> int:
    """Run the load; 1 when a request is not accounted for, something is held at the end, or memory grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--streams", type=int, default=500, help="at one time (default 500)")
    parser.add_argument("--unread", type=int, default=50, help="requests whose client stops reading (default 50)")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    plan = Plan(arguments.requests, arguments.streams, arguments.unread)
    told, problems = asyncio.run(measure(plan))
    arguments.output.write_text(told, encoding="utf-8")
    print("\n".join(problems) or "all is accounted for, and memory is flat")
    return bool(problems)


async def measure(plan: Plan) -> tuple[str, list[str]]:
    """The report, and what is wrong."""
    flags = ["--tp", "1", "--max-live-requests", str(plan.streams), "--write-deadline-s", "20"]
    drafter = ["--drafter", str(embedded_path("gemray-tiny-assistant"))]
    async with starting(embedded_path("gemray-tiny"), *flags, *drafter) as process:
        address = (await line_with(process, "ready: serving")).split()[-1]
        draining = asyncio.create_task(_discard(process.stderr))
        ranks = {f"rank {i}": rank for i, rank in enumerate(ranks_of(process))}
        began = time.monotonic()
        async with watched_memory({"coordinator": psutil.Process(process.pid), **ranks}) as memory:
            outcome = await run_load(address, plan)
        seconds = time.monotonic() - began
        stats = await _idle_stats(address)
        draining.cancel()
    problems = list(_problems(plan, outcome, stats, memory))
    return "\n".join(_report(plan, outcome, stats, memory, seconds, problems)) + "\n", problems


async def _discard(stream: asyncio.StreamReader | None) -> None:
    while stream is not None and await stream.read(1 << 16):
        pass


async def _idle_stats(address: str) -> pb.GetServerStatsResponse:
    """Counts once nothing runs: the newest cancels may be on their way."""
    async with AsyncClient(address) as client:
        for _ in range(100):
            stats = await client.server_stats()
            if not stats.requests.active and not stats.engine.num_running + stats.engine.num_waiting:
                break
            await asyncio.sleep(0.2)
    return stats


def _problems(plan: Plan, outcome: Outcome, stats: pb.GetServerStatsResponse, memory: MemoryOverTime) -> Iterator[str]:
    requests, status = stats.requests, outcome.by_status
    if outcome.count != plan.requests:
        yield f"{plan.requests} requests were sent, {outcome.count} have ended"
    yield from outcome.unexpected[:20]
    taken = requests.completed + requests.cancelled + requests.failed + requests.rejected
    if not plan.requests - status["CANCELLED"] <= taken <= plan.requests:
        yield f"the server counts {taken} of {plan.requests} requests, of which {status['CANCELLED']} were cancelled"
    refused = status["RESOURCE_EXHAUSTED"]
    if not refused <= requests.rejected <= refused + status["CANCELLED"]:  # who cancels does not hear of it
        yield f"the server refused {requests.rejected} requests, its clients know of {refused}"
    if requests.failed or requests.active:
        yield f"{requests.failed} requests failed, {requests.active} are still held"
    if held := [pool.group for pool in stats.engine.pools if pool.pages_in_use]:
        yield f"pages are held in {', '.join(held)}"
    parts = memory.medians(PARTS)
    for name, first in parts[2][1].items():
        if parts[-1][1][name] - first > MOST_GROWTH_MIB:
            yield f"{name} grew from {first:.0f} to {parts[-1][1][name]:.0f} MiB"


def _report(
    plan: Plan,
    outcome: Outcome,
    stats: pb.GetServerStatsResponse,
    memory: MemoryOverTime,
    seconds: float,
    problems: list[str],
) -> Iterator[str]:
    requests = stats.requests
    yield f"{_machine()}; gemray {version('gemray')}, torch {version('torch')}, ray {version('ray')}, grpcio"
    yield f"{version('grpcio')}; gemray-tiny with MTP, one rank, float32; the clients on the same machine."
    yield ""
    yield f"{plan.requests} streams in {seconds:.0f} s, up to {outcome.most_at_once} of them read at one time and"
    yield f"{plan.unread} left unread beside them; {outcome.tokens} tokens came."
    yield ""
    yield "| | completed | cancelled | refused | unread for too long | failed |\n| --- | --- | --- | --- | --- | --- |"
    s = outcome.by_status
    yield (
        f"| as clients saw it | {s['OK']} | {s['CANCELLED']} | {s['RESOURCE_EXHAUSTED']} | {s['DEADLINE_EXCEEDED']} | "
        f"{len(outcome.unexpected)} |"
    )
    r = requests
    yield f"| as the server counts | {r.completed} | {r.cancelled} | {r.rejected} | | {r.failed} |"
    yield ""
    yield "A stream that is left unread counts as completed at the server once the engine is done with it. A cancel"
    yield "may reach the server before its request (it then counts nowhere there) or after its end."
    yield ""
    names = list(memory.samples[0][1])
    yield f"| until, s | {' | '.join(f'{name}, MiB' for name in names)} |"
    yield "| --- " * (1 + len(names)) + "|"
    for until, medians in memory.medians(PARTS):
        yield f"| {until:.0f} | {' | '.join(f'{medians[name]:.0f}' for name in names)} |"
    yield ""
    yield "\n".join(f"- {problem}" for problem in problems) or "All is accounted for; memory is flat after the start."


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    load = os.getloadavg()[0]
    return f"{len(os.sched_getaffinity(0))} cores of {model}, load average {load:.0f} at the end"


if __name__ == "__main__":
    sys.exit(main())
