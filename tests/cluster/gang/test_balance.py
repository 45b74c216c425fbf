"""Requests that wait in one replica go to another that has a slot. Gangs without processes."""

from __future__ import annotations

import asyncio

import msgspec

from gemray_cluster.gang.client import GangState
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_workers.messages import EngineStats
from support.cluster.stepped_gangs import (
    Client,
    Gangs,
    Routers,
    SteppedGang,
    all_get_a_token,
    finish,
    given,
    submit,
    tokens,
)
from support.waiting import HANG_S, eventually


async def test_a_replica_that_joins_takes_what_waits(routers: Routers) -> None:
    """The newest of them, which would wait longest, and no more than get a slot."""
    gate = asyncio.Event()
    gangs = Gangs(lambda index: SteppedGang(gate=gate if index else None))
    router = routers(ReplicaLimits(min_replicas=1, max_replicas=2, scale_up_s=0.01))
    await router.start(gangs, slots=2)
    begun = [Client(router, submit(f"begun{i}", prompt=[i + 1])) for i in range(2)]
    await eventually(lambda: len(gangs[0].submitted) == 2)
    await all_get_a_token(gangs, begun)
    waiting = []
    for i in range(4):
        waiting.append(Client(router, submit(f"waits{i}", prompt=[i + 9])))
        await eventually(lambda i=i: len(gangs[0].submitted) == 3 + i)  # type: ignore[misc]
    gate.set()
    await eventually(lambda: len(gangs.made) == 2 and len(gangs[1].submitted) == 2)
    assert [request.request_id for request in gangs[1].submitted] == ["waits3", "waits2"]
    await eventually(lambda: [gang.num_active for gang in gangs.made] == [4, 2])
    assert [status.num_live for status in router.replicas] == [4, 2]
    gate.clear()
    await gangs[1].fail()  # it gives back what it has not begun, too
    await eventually(lambda: gangs[0].num_active == 6)
    clients = [*begun, *waiting]
    await finish(gangs, *clients)
    assert [client.ids for client in clients] == [tokens(gangs[0], client.request) for client in clients]
    assert not any(status.num_live for status in router.replicas)


async def test_requests_that_have_begun_stay(routers: Routers) -> None:
    gate = asyncio.Event()
    gangs = Gangs(lambda index: SteppedGang(gate=gate if index else None))
    router = routers(ReplicaLimits(min_replicas=1, max_replicas=2, scale_up_s=0.01))
    await router.start(gangs, slots=1)
    clients = [Client(router, submit(f"r{i}", prompt=[i + 1])) for i in range(4)]
    await eventually(lambda: len(gangs[0].submitted) == 4)
    await all_get_a_token(gangs, clients)
    gate.set()
    await eventually(lambda: len(router.replicas) == 2 and router.replicas[1].state is GangState.SERVING)
    for _ in range(3):
        router._balance()
        await asyncio.sleep(0)
    assert gangs[1].submitted == []
    await finish(gangs, *clients)


class CrowdedGang(SteppedGang):
    """Has slots, but one of its requests waits for pages."""

    @property
    def stats(self) -> EngineStats | None:
        stats = super().stats
        return stats and msgspec.structs.replace(stats, num_waiting=1)


async def test_what_waits_for_pages_goes_too_but_not_to_and_fro(routers: Routers) -> None:
    gangs = Gangs(lambda index: SteppedGang() if index else CrowdedGang())
    router = routers(ReplicaLimits(replicas=2), tick_s=HANG_S)
    await router.start(gangs, slots=8)
    crowded, idle = router._replicas
    idle.has_suspect = True  # so that all go to the other one
    places = await given(router, gangs, *(submit(f"r{i}", prompt=[i + 1]) for i in range(3)))
    router._balance()
    assert [status.num_live for status in router.replicas] == [3, 0], "nobody joins a suspect"
    idle.has_suspect = False
    for _ in range(3):
        router._balance()
        await asyncio.sleep(0.01)
    assert places == [0, 0, 0]
    assert [request.request_id for request in gangs[1].submitted] == ["r2"]
    assert (crowded.num_live, idle.num_live) == (2, 1)
