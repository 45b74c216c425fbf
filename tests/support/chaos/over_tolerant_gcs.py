"""Faults of a GCS that keeps its tables in a Redis, under `gemray serve` on that cluster and 20 streams.

PYTHONPATH=tests python -m support.chaos.over_redis --redis-server /usr/bin/redis-server --output table.md
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from support.chaos.census_of_ray import num_placement_groups
from support.chaos.family import answers_alone, requests
from support.chaos.faults import Outcome, all_move, under_way
from support.chaos.over_ray import OF_A_RANK, strike_over_ray
from support.chaos.redis_cluster import RedisCluster
from support.chaos.report import FaultReport, publish
from support.chaos.serve_over_ray import RANKS, REPLICAS, ServeOverRay, free_port
from support.chaos.server_process import START_S
from support.chaos.streams import Streams

SETTLE_S = 20.0
"""How long after the GCS has come back a gang that it cost would have failed."""


async def kill_gcs(cluster: RedisCluster, server: ServeOverRay, streams: Streams, down_s: float) -> Outcome:
    """Kill the GCS under streams and start it again after `down_s`; no gang may fail of it."""
    await under_way(streams)
    failed, num_live, began = server.count("the gang failed"), streams.num_begun, time.monotonic()
    cluster.kill_gcs()
    await asyncio.sleep(down_s)
    cluster.start_gcs()
    back = time.monotonic()
    await asyncio.sleep(SETTLE_S)
    assert server.count("the gang failed") == failed, "a gang failed of it"
    await all_move(streams)
    name = f"SIGKILL of the GCS, back after {back - began:.0f} s"
    return Outcome(name, num_live, 0.0, 0.0, streams.take_longest_pause())


async def kill_gcs_and_a_rank(cluster: RedisCluster, server: ServeOverRay, streams: Streams, down_s: float) -> Outcome:
    """Kill the GCS and, while it is away, a rank: its gang is rebuilt once the GCS is back."""
    await under_way(streams)

    async def restart() -> None:
        await asyncio.sleep(down_s)
        cluster.start_gcs()

    cluster.kill_gcs()
    restarting = asyncio.create_task(restart())
    name = f"SIGKILL of a rank, {down_s:g} s before a killed GCS is back"
    outcome = await strike_over_ray(server, streams, replace(OF_A_RANK, name=name))
    await restarting
    return outcome


async def main(options: argparse.Namespace) -> int:
    """Every fault once; 0 when no request was lost or changed."""
    asked = requests(options.streams, options.max_tokens)
    expected = answers_alone(asked)
    cluster = await RedisCluster.start(options.redis_server, REPLICAS * RANKS)
    try:
        server = await ServeOverRay.start(
            options.log, port=free_port(), heartbeat_s=options.heartbeat_s, cluster=cluster
        )
        report, streams = FaultReport(), Streams(server.address, asked, expected)
        try:
            report.tell(await kill_gcs(cluster, server, streams, options.down_s), streams)
            report.tell(await strike_over_ray(server, streams, OF_A_RANK), streams)
            report.tell(await kill_gcs_and_a_rank(cluster, server, streams, options.down_s), streams)
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
    parser.add_argument("--redis-server", default=shutil.which("redis-server"), help="the program (default: in PATH)")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--heartbeat-s", type=float, default=15.0, help="silence after which a gang counts as hung")
    parser.add_argument("--down-s", type=float, default=8.0, help="how long the GCS is away")
    parser.add_argument("--log", type=Path, default=Path("chaos.log"), help="where the server logs")
    parser.add_argument("--output", type=Path, help="where the table goes, too")
    arguments = parser.parse_args()
    if arguments.redis_server is None:
        parser.error("no redis-server in PATH: say where one is with --redis-server")
    sys.exit(asyncio.run(main(arguments)))
