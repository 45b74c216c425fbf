"""Rank 0 of a tiny model is killed on CPU: the scenario that runs on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_workers.parallel.communicator import SoloCommunicator
from support.cluster.process_launcher import ProcessLauncher
from support.cluster.survival import kill_and_go_on, surviving_config, surviving_requests
from support.engine.engine_runner import run_engine
from support.waiting import HANG_S

CLUSTER = ClusterConfig(
    placement_deadline_s=HANG_S, start_deadline_s=HANG_S, heartbeat_deadline_s=HANG_S, stop_deadline_s=HANG_S
)


@pytest.mark.slow
async def test_streams_go_on_after_a_kill_of_the_lead() -> None:
    config, submits = surviving_config("cpu"), surviving_requests("cpu")
    plain = run_engine(
        SoloCommunicator(), replace(config, tensor_parallel_size=1, drafter_path=None, num_draft_tokens=None), submits
    )
    assert plain is not None
    served = ServedCheckpoints()
    survived = await kill_and_go_on(
        lambda: Gang(ProcessLauncher(config), CLUSTER, config, served), submits, victims=[0], deadline_s=HANG_S
    )
    assert survived.ids == plain.ids
    assert survived.finishes == {"length"}
    assert len(survived.rebuild_seconds) == 1
    total = sum(len(ids) for ids in plain.ids.values())
    assert all(0 < tokens < total for tokens in survived.tokens_at_kill), "killed while streams ran"
