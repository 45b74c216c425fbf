"""`kill -9` of either rank of a gang on two GPUs: the gang is built anew, and every stream goes on with its ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec

import pytest

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_workers.config import EngineConfig
from gemray_workers.parallel.communicator import SoloCommunicator
from support.cluster.process_launcher import ProcessLauncher
from support.cluster.survival import kill_and_go_on, surviving_config, surviving_requests
from support.engine.engine_runner import Run
from support.engine.gpu import needs_gpus, run_on_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.cards(2), pytest.mark.timeout(0)]

CLUSTER = ClusterConfig(placement_deadline_s=60, start_deadline_s=200, heartbeat_deadline_s=30, stop_deadline_s=10)
MakeGang = Callable[[EngineConfig], Gang]


@cache
def plain() -> Run:
    """On one card, without a drafter; its programs are compiled on all cores first, as servers do."""
    config = replace(surviving_config("cuda"), tensor_parallel_size=1, drafter_path=None, num_draft_tokens=None)
    run = run_on_gpus(SoloCommunicator(), config, surviving_requests("cuda"), warm=True)
    assert run is not None
    return run


@pytest.fixture(params=["processes", "ray"])
async def make_gang(request: pytest.FixtureRequest) -> AsyncIterator[MakeGang]:
    """Gangs over plain processes, or over a Ray of this machine with its GPUs."""
    needs_gpus(2)
    served = ServedCheckpoints()
    if request.param == "processes":
        yield lambda engine: Gang(ProcessLauncher(engine), CLUSTER, engine, served)
        return
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    from gemray_cluster.ray_runtime.launcher import RayGang
    from gemray_cluster.ray_runtime.session import RaySession

    session = await RaySession.open(CLUSTER, num_ranks=2)
    yield partial(RayGang, session, CLUSTER, served=served)
    await session.close()


async def test_streams_go_on_after_kills_of_either_rank(
    make_gang: MakeGang,
    cards_alone: Callable[[int], AbstractContextManager[None]],
    record_property: Callable[[str, object], None],
) -> None:
    config, submits = surviving_config("cuda"), surviving_requests("cuda")
    wanted = plain().ids
    with cards_alone(2):
        survived = await kill_and_go_on(lambda: make_gang(config), submits, victims=[1, 0], deadline_s=200)
    total = sum(len(ids) for ids in wanted.values())
    seconds = ", ".join(f"{s:.1f}" for s in survived.rebuild_seconds)
    line = f"{survived.tokens_at_kill} of {total} tokens at the kills; serving again after {seconds} s"
    line += "; rank 0 loaded in " + "; ".join(survived.loads)
    record_property("rebuilds", line)
    print(line)
    assert survived.ids == wanted
    assert survived.finishes == {"length"}
    assert all(0 < tokens < total for tokens in survived.tokens_at_kill), "killed while streams ran"
