"""Two replicas whose ranks are killed and hung in turn: no request is lost or changed. Workers without a model."""

from __future__ import annotations

import pytest

from gemray_cluster.gang.client import GangState
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.router import Router
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_workers.config import EngineConfig
from gemray_workers.messages import Submit
from gemray_workers.sampling.params import SamplingParams
from support.cluster.chaos import Clients, Fault, faults, strike
from support.cluster.fake_worker import FakeWorker, expected_token
from support.cluster.gang_log import GangLog
from support.cluster.process_launcher import ProcessLauncher
from support.waiting import HANG_S

CLUSTER = ClusterConfig(placement_deadline_s=HANG_S, start_deadline_s=HANG_S, heartbeat_deadline_s=5, stop_deadline_s=3)
"""A process that is stopped is told by its silence, so this is waited for."""
TOKENS = 150


def submit(index: int) -> Submit:
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=index, max_tokens=TOKENS + index)
    return Submit(request_id=f"r{index}", prompt_ids=[1, index], params=params)


def make_gang() -> Gang:
    engine = EngineConfig(
        model_path="/fake", tensor_parallel_size=2, dtype="float32", device="cpu", kv_memory_bytes=1,
        collective_timeout_s=HANG_S,
    )  # fmt: skip
    return Gang(ProcessLauncher(engine, FakeWorker), CLUSTER, engine, ServedCheckpoints())


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults(2), ids=lambda fault: fault.name.replace(" ", "-"))
async def test_no_request_is_lost_or_changed(fault: Fault) -> None:
    """A slow machine may take a live gang for a hung one, which is one rebuild more and changes nothing here."""
    gangs, router = GangLog(make_gang), Router(ReplicaLimits(replicas=2), max_rebuilds=100)
    await router.start(gangs, slots=32)
    clients = Clients(router, [submit(i) for i in range(20)])
    try:
        outcome = await strike(router, clients, gangs, fault, deadline_s=HANG_S)
        assert outcome.num_hit > 0
        assert router.state is GangState.SERVING
        await clients.end(HANG_S)
    finally:
        clients.cancel()
        await router.stop()
    assert clients.lost == []
    assert len(clients.answers) >= 20
    for request_id, ids in clients.answers:
        index = int(request_id[1:])
        assert ids == [expected_token(index, position) for position in range(TOKENS + index)]
