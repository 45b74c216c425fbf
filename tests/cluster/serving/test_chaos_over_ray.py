"""`gemray serve` over two replicas of two ranks and 20 streams, while Ray's own processes are killed and stopped.

``python -m support.chaos.over_ray`` and ``python -m support.chaos.over_tolerant_gcs`` do the same for longer. What each
fault cost is a property of its test.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from gemray.v1 import generation_pb2 as pb
from support.chaos.census_of_ray import num_placement_groups
from support.chaos.family import answers_alone, requests
from support.chaos.faults import runs
from support.chaos.over_ray import GCS_STOPPED, RAYLET_KILLED, RAYLET_STOPPED, strike_over_ray
from support.chaos.over_tolerant_gcs import miss_gcs, miss_gcs_and_a_rank
from support.chaos.serve_over_ray import RANKS, REPLICAS, ServeOverRay, free_port
from support.chaos.server_process import START_S
from support.chaos.streams import Streams
from support.chaos.tolerant_cluster import KEEPS_TABLES_ON_DISK, TolerantCluster
from support.waiting import HANG_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

STREAMS = 20
MAX_TOKENS = 64
HEARTBEAT_S = 20
"""A machine that starts four ranks under load has made a live one wait for 10 s."""
IMPATIENCE = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
}
"""After which Ray gives up a node whose raylet hangs, in some 15 s instead of 65."""
REDIS = shutil.which("redis-server")

Expected = tuple[list[pb.GenerateStreamRequest], dict[str, list[int]]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    asked = requests(STREAMS, MAX_TOKENS)
    return asked, answers_alone(asked)


@pytest.mark.timeout(4 * HANG_S)  # a start and three faults, each with a start behind it: 12 min on two slow cores
async def test_faults_of_its_own_ray(
    tmp_path: Path, expected: Expected, record_property: Callable[[str, object], None]
) -> None:
    """Streams go on; when the server is killed, all that it started ends."""
    server = await ServeOverRay.start(
        tmp_path / "server.log", port=free_port(), heartbeat_s=HEARTBEAT_S, environment=IMPATIENCE
    )
    streams = Streams(server.address, *expected)
    try:
        for fault in (GCS_STOPPED, RAYLET_KILLED, RAYLET_STOPPED):
            record_property("fault", (await strike_over_ray(server, streams, fault)).line)
            assert streams.wrong == []
        await streams.end(START_S)
        ranks = server.ranks()
    finally:
        await streams.cancel()
        await server.kill()
        print(server.log.read_text())
    assert streams.wrong == []
    assert streams.num_whole >= STREAMS
    assert len(ranks) == REPLICAS * RANKS
    await eventually(lambda: not any(map(runs, ranks)), START_S)


@pytest_asyncio.fixture(loop_scope="module")
async def cluster() -> AsyncIterator[TolerantCluster]:
    if REDIS is None and not KEEPS_TABLES_ON_DISK:
        pytest.skip("no GCS can be fault tolerant here: this Ray keeps no tables on disk, and there is no redis-server")
    running = await TolerantCluster.start(REDIS, REPLICAS * RANKS)
    try:
        yield running
    finally:
        running.end()


async def test_a_gcs_that_is_fault_tolerant(
    tmp_path: Path, cluster: TolerantCluster, expected: Expected, record_property: Callable[[str, object], None]
) -> None:
    """No gang fails of a GCS that is away for a while; one that fails meanwhile is rebuilt when the GCS is back."""
    server = await ServeOverRay.start(
        tmp_path / "server.log", port=free_port(), heartbeat_s=HEARTBEAT_S, cluster=cluster
    )
    streams = Streams(server.address, *expected)
    try:
        outcomes = [
            await miss_gcs(cluster, server, streams, "stopped", down_s=4, settle_s=1),
            await miss_gcs_and_a_rank(cluster, server, streams, "killed", down_s=4),
        ]
        for outcome in outcomes:
            record_property("fault", outcome.line)
        await streams.end(START_S)
        groups = num_placement_groups(cluster.address)
    finally:
        await streams.cancel()
        await server.kill()
        print(server.log.read_text())
    assert streams.wrong == []
    assert streams.num_whole >= STREAMS
    assert groups == REPLICAS
