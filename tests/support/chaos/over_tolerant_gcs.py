"""Faults of a GCS that keeps its tables, under `gemray serve` on that cluster and 20 streams.

PYTHONPATH=tests python -m support.chaos.over_tolerant_gcs --redis-server /usr/bin/redis-server --output table.md

Without ``--redis-server`` the tables are on disk, where Ray can keep them there (2.60 can).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from support.chaos.census_of_ray import num_placement_groups
from support.chaos.family import answers_alone, requests
from support.chaos.faults import Outcome, all_move, under_way
from support.chaos.over_ray import A_RANK_KILLED, strike_over_ray
from support.chaos.report import FaultReport, publish
from support.chaos.serve_over_ray import RANKS, REPLICAS, ServeOverRay, free_port
from support.chaos.server_process import START_S
from support.chaos.streams import Streams
from support.chaos.tolerant_cluster import KEEPS_TABLES_ON_DISK, TolerantCluster

SETTLE_S = 20.0
"""How long after the GCS has come back a gang that it cost would have failed."""
Fault = Literal["killed", "stopped"]


@asynccontextmanager
async def gcs_away(cluster: TolerantCluster, fault: Fault, down_s: float) -> AsyncIterator[asyncio.Task[None]]:
    """A block that begins without the GCS; the task ends when it is back, `down_s` later."""
    if fault == "killed":
        cluster.kill_gcs()
    else:
        cluster.gcs().suspend()

    async def bring_back() -> None:
        await asyncio.sleep(down_s)
        if fault == "killed":
            cluster.start_gcs()
        else:
            cluster.gcs().resume()

    returning = asyncio.create_task(bring_back())
    try:
        yield returning
    finally:
        await returning


async def miss_gcs(
    cluster: TolerantCluster, server: ServeOverRay, streams: Streams, fault: Fault, down_s: float, settle_s: float
) -> Outcome:
    """Take the GCS away under streams for `down_s`; no gang may fail of it until `settle_s` after its return."""
    await under_way(streams)
    failed, num_live, began = server.count("the gang failed"), streams.num_begun, time.monotonic()
    async with gcs_away(cluster, fault, down_s):
        pass
    back = time.monotonic()
    await asyncio.sleep(settle_s)
    assert server.count("the gang failed") == failed, "a gang failed of it"
    await all_move(streams)
    name = f"the GCS {fault}, back after {back - began:.0f} s"
    return Outcome(name, num_live, None, None, streams.take_longest_pause())


async def miss_gcs_and_a_rank(
    cluster: TolerantCluster, server: ServeOverRay, streams: Streams, fault: Fault, down_s: float
) -> Outcome:
    """Take the GCS away and, meanwhile, kill a rank: its gang is rebuilt once the GCS is back."""
    await under_way(streams)
    async with gcs_away(cluster, fault, down_s):
        name = f"SIGKILL of a rank, {down_s:g} s before a GCS is back that was {fault}"
        return await strike_over_ray(server, streams, replace(A_RANK_KILLED, name=name))


async def main(options: argparse.Namespace) -> int:
    """Every fault once; 0 when no request was lost or changed."""
    asked = requests(options.streams, options.max_tokens)
    expected = answers_alone(asked)
    cluster = await TolerantCluster.start(options.redis_server, REPLICAS * RANKS)
    try:
        server = await ServeOverRay.start(
            options.log, port=free_port(), heartbeat_s=options.heartbeat_s, cluster=cluster
        )
        report, streams = FaultReport(), Streams(server.address, asked, expected)
        try:
            for fault in get_args(Fault):
                report.tell(await miss_gcs(cluster, server, streams, fault, options.down_s, SETTLE_S), streams)
                report.tell(await miss_gcs_and_a_rank(cluster, server, streams, fault, options.down_s), streams)
            await streams.end(START_S)
            groups = num_placement_groups(cluster.address)
        finally:
            await streams.cancel()
            await server.kill()
    finally:
        cluster.end()
    more = f"At the end there were {groups} placement groups for {REPLICAS} replicas."
    publish(report.text(streams, more), streams.wrong, options.output)
    return 1 if streams.wrong or groups != REPLICAS else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--redis-server", metavar="PROGRAM", help="keep the tables in a Redis (default: on disk)")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--heartbeat-s", type=float, default=15.0, help="silence after which a gang counts as hung")
    parser.add_argument("--down-s", type=float, default=8.0, help="how long the GCS is away")
    parser.add_argument("--log", type=Path, default=Path("chaos.log"), help="where the server logs")
    parser.add_argument("--output", type=Path, help="where the table goes, too")
    arguments = parser.parse_args()
    if arguments.redis_server is None and not KEEPS_TABLES_ON_DISK:
        parser.error("this version of Ray keeps no tables on disk: say where a Redis is with --redis-server")
    sys.exit(asyncio.run(main(arguments)))
