"""Replicas as one gang: which one gets a request, and where it goes on. Gangs without processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from gemray_cluster.gang.client import GangState, GangUnavailable, ReplicaStatus
from gemray_cluster.gang.launcher import StartProgress
from gemray_cluster.gang.prefix_affinity import BLOCK_TOKENS
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.gang.start_of_all import StartOfAll
from gemray_workers.errors import CapacityError
from gemray_workers.messages import SequenceDelta, Submit
from support.cluster.fake_gang import gang_info
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


async def test_requests_go_to_the_least_loaded_in_turns(routers: Routers) -> None:
    gangs, router = Gangs(), routers(ReplicaLimits(replicas=3))
    await router.start(gangs, slots=8)
    places = await given(router, gangs, *(submit(f"r{i}", prompt=[i + 1]) for i in range(9)))
    assert sorted(places[:3]) == [0, 1, 2]
    assert places == places[:3] * 3
    assert [status.num_live for status in router.replicas] == [3, 3, 3]


@pytest.mark.parametrize(("slots", "more"), [(16, 2), (4, 1)])
async def test_a_known_beginning_attracts_until_the_load_says_otherwise(
    routers: Routers, slots: int, more: int
) -> None:
    """So many requests more than the least loaded are borne: an eighth of the slots, and one where they are few."""
    gangs, router = Gangs(), routers(ReplicaLimits(replicas=2))
    await router.start(gangs, slots=slots)
    document = [9] * 3 * BLOCK_TOKENS
    places = await given(router, gangs, *(submit(f"r{i}", prompt=[*document, i]) for i in range(2 + 2 * more)))
    home = places[0]
    assert places == [home] * (1 + more) + [1 - home] * (1 + more), "once both know it the load decides"


async def test_a_failed_gangs_requests_go_on_at_once_in_another(routers: Routers) -> None:
    gate = asyncio.Event()
    gangs = Gangs(lambda index: SteppedGang(gate=gate if index >= 2 else None))
    router = routers(ReplicaLimits(replicas=2))
    await router.start(gangs, slots=8)
    clients = [Client(router, submit(f"r{i}", prompt=[i + 1])) for i in range(4)]
    await eventually(lambda: [len(gang.submitted) for gang in gangs.made] == [2, 2])
    await all_get_a_token(gangs, clients)
    moved = {request.request_id for request in gangs[0].submitted}
    await gangs[0].fail()
    await eventually(lambda: len(gangs[1].submitted) == 4)
    assert {request.request_id for request in gangs[1].submitted[2:]} == moved
    assert router.state is GangState.SERVING, "the other one does"
    await finish(gangs, *clients)
    assert [client.ids for client in clients] == [tokens(gangs[1], client.request) for client in clients]
    gate.set()
    await eventually(lambda: router.num_rebuilds == 1)
    assert [status.num_live for status in router.replicas] == [0, 0]


async def test_requests_wait_while_no_gang_serves(routers: Routers) -> None:
    gate = asyncio.Event()
    gangs = Gangs(lambda index: SteppedGang(gate=gate if index >= 2 else None))
    router = routers(ReplicaLimits(replicas=2))
    await router.start(gangs, slots=8)
    client = Client(router, submit())
    await eventually(lambda: any(gang.submitted for gang in gangs.made))
    await gangs[0].fail("the first")
    await gangs[1].fail("the second")
    await eventually(lambda: len(gangs.made) == 4)
    assert router.state is GangState.STARTING
    assert router.failure == "replica 0: the first; replica 1: the second"
    with pytest.raises(GangUnavailable, match=r"the gang is starting: replica 0: the first"):
        await Client(router, submit("new")).task
    gate.set()
    await finish(gangs, client)
    assert client.ids == tokens(gangs[0], client.request)


class MortalGang(SteppedGang):
    """Gives the request ``deadly`` nothing; that it fails of it is told by the test."""

    async def generate(self, request: Submit) -> AsyncGenerator[SequenceDelta, None]:
        if request.request_id == "deadly":
            self.submitted.append(request)
            await self._ended.wait()
            raise GangUnavailable("the gang is failed")
        async for delta in super().generate(request):
            yield delta


async def test_a_deadly_request_takes_three_gangs_the_last_of_them_alone(routers: Routers) -> None:
    """Its second failure makes it a suspect, which waits for a gang of its own while the others go on."""
    gates = {2: asyncio.Event(), 3: asyncio.Event()}
    gangs = Gangs(lambda index: MortalGang(gate=gates.get(index)))
    router = routers(ReplicaLimits(replicas=2))
    await router.start(gangs, slots=64)
    clients = [Client(router, submit(f"r{i}", prompt=[i + 1])) for i in range(4)]
    await eventually(lambda: [len(gang.submitted) for gang in gangs.made] == [2, 2])
    await all_get_a_token(gangs, clients)
    deadly = Client(router, submit("deadly"))
    await eventually(lambda: sum(len(gang.submitted) for gang in gangs.made) == 5)
    first, second = sorted(gangs.made, key=lambda gang: -len(gang.submitted))
    await first.fail("killed")
    await eventually(lambda: len(second.submitted) == 5)
    await all_get_a_token(gangs, clients)
    await second.fail("killed")
    await eventually(lambda: len(gangs.made) == 4)
    gates[2].set()
    await eventually(lambda: len(gangs[2].submitted) == 4)
    assert {request.request_id for request in gangs[2].submitted} == {"r0", "r1", "r2", "r3"}
    assert not deadly.task.done(), "it waits for the second gang to be built"
    gates[3].set()
    await eventually(lambda: [request.request_id for request in gangs[3].submitted] == ["deadly"])
    await gangs[3].fail("killed")
    with pytest.raises(GangUnavailable):
        await deadly.task
    await finish(gangs, *clients)
    assert [client.ids for client in clients] == [tokens(gangs[2], client.request) for client in clients]
    await eventually(lambda: router.num_rebuilds == 3)
    assert gangs[2].state is GangState.SERVING, "the gang that the others use has not failed"


async def test_a_suspect_leaves_the_only_gang_to_others_while_another_is_built(routers: Routers) -> None:
    gates = {2: asyncio.Event(), 3: asyncio.Event()}
    gangs = Gangs(lambda index: MortalGang(gate=gates.get(index)))
    router = routers(ReplicaLimits(replicas=2))
    await router.start(gangs, slots=64)
    deadly = Client(router, submit("deadly"))
    for killed in range(2):
        await eventually(lambda killed=killed: sum(len(gang.submitted) for gang in gangs.made) == killed + 1)  # type: ignore[misc]
        (gang,) = (gang for gang in gangs.made if gang.submitted and gang.state is GangState.SERVING)
        await gang.fail("killed")
    await eventually(lambda: len(gangs.made) == 4)
    gates[2].set()
    await eventually(lambda: router.state is GangState.SERVING)
    client = Client(router, submit("other"))
    await finish(gangs, client)
    assert [request.request_id for request in gangs[2].submitted] == ["other"], "it was free, and nobody else's place"
    gates[3].set()
    await eventually(lambda: any("deadly" in {r.request_id for r in gang.submitted} for gang in gangs.made[2:]))
    assert not deadly.task.done()


async def test_others_avoid_a_replica_that_tries_a_suspect(routers: Routers) -> None:
    gangs, router = Gangs(), routers(ReplicaLimits(replicas=2))
    await router.start(gangs, slots=64)
    router._replicas[0].has_suspect = True
    assert await given(router, gangs, *(submit(f"r{i}", prompt=[i + 1]) for i in range(3))) == [1, 1, 1]
    router._replicas[1].has_suspect = True
    assert await given(router, gangs, submit("r3", prompt=[9])) == [0], "there is no other"


async def test_a_replica_that_failed_for_good_is_replaced_and_the_rest_goes_on(routers: Routers) -> None:
    gangs, router = Gangs(), routers(ReplicaLimits(replicas=2), max_rebuilds=0)
    await router.start(gangs, slots=8)
    await gangs[0].fail()
    await eventually(lambda: len(gangs.made) == 3 and len(router.replicas) == 2)
    await eventually(lambda: [status.state for status in router.replicas] == [GangState.SERVING] * 2)
    assert [status.index for status in router.replicas] == [0, 1]
    client = Client(router, submit())
    await finish(gangs, client)


async def test_counts_go_on_over_rebuilds_and_over_replicas_that_go(
    routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    gangs, router = Gangs(), routers(ReplicaLimits(replicas=2), max_rebuilds=1)
    await router.start(gangs, slots=8)
    assert [_counts(status) for status in router.replicas] == [(0, 13, 80), (0, 13, 80)]
    caplog.clear()
    await gangs[1].fail("rank 0 is gone")
    await eventually(lambda: router.num_rebuilds == 1)
    assert "rebuilding replica 1 (1 of at most 1 times within 300 s), which failed: rank 0 is gone" in caplog.text
    assert "replica 1 serves again" in caplog.text
    assert [_counts(status) for status in router.replicas] == [(0, 13, 80), (1, 26, 80)]
    await gangs[2].fail()  # for good: another replica takes its index
    await eventually(lambda: len(gangs.made) == 4)
    await eventually(lambda: [status.state for status in router.replicas] == [GangState.SERVING] * 2)
    assert "replica 1 is left out: rank 1 died" in caplog.text
    assert [_counts(status) for status in router.replicas] == [(0, 13, 80), (1, 39, 80)]
    assert router.stats is not None
    assert (router.num_rebuilds, router.stats.generated_tokens, router.stats.pages_total["full"]) == (1, 52, 160)


def _counts(status: ReplicaStatus) -> tuple[int, int, int]:
    assert status.stats is not None
    return status.num_rebuilds, status.stats.generated_tokens, status.stats.pages_total["full"]


async def test_it_ends_when_no_replica_is_left(routers: Routers) -> None:
    gangs = Gangs(lambda index: SteppedGang(refuses=index >= 2))
    router = routers(ReplicaLimits(replicas=2), max_rebuilds=0)
    await router.start(gangs, slots=8)
    client = Client(router, submit())
    await eventually(lambda: any(gang.submitted for gang in gangs.made))
    await gangs[0].fail()
    await gangs[1].fail()
    assert await asyncio.wait_for(router.wait_ended(), HANG_S) is GangState.FAILED
    with pytest.raises(GangUnavailable, match="the gang failed"):
        await client.task
    assert "rank 1 died" in (router.failure or "")


async def test_a_start_that_fails_ends_the_other_replicas(routers: Routers) -> None:
    gangs = Gangs(lambda index: SteppedGang(refuses=index == 1))
    router = routers(ReplicaLimits(replicas=3))
    with pytest.raises(CapacityError):
        await router.start(gangs, slots=8)
    assert [gang.stopped for gang in gangs.made] == [True] * 3


async def test_replicas_follow_the_load(routers: Routers) -> None:
    gangs = Gangs()
    router = routers(ReplicaLimits(min_replicas=1, max_replicas=2, scale_up_s=0.05, scale_down_s=0.05))
    await router.start(gangs, slots=2)
    clients = [Client(router, submit(f"r{i}", prompt=[i + 1])) for i in range(4)]
    await eventually(lambda: len(router.replicas) == 2 and router.replicas[1].state is GangState.SERVING)
    await eventually(lambda: len(gangs[1].submitted) == 2)  # two of those that waited
    clients.append(Client(router, submit("late", prompt=[77])))
    await finish(gangs, *clients)
    await eventually(lambda: len(router.replicas) == 1)
    assert [gang.stopped for gang in gangs.made].count(True) == 1
    client = Client(router, submit("last"))
    await finish(gangs, client)
    assert client.ids == tokens(gangs[0], client.request)


async def test_of_equal_replicas_the_newest_goes(routers: Routers) -> None:
    gangs, router = Gangs(), routers(ReplicaLimits(replicas=3, min_replicas=2, scale_down_s=0.05))
    await router.start(gangs, slots=8)
    await eventually(lambda: len(router.replicas) == 2)
    assert [status.index for status in router.replicas] == [0, 1]


async def test_a_replica_that_goes_ends_its_requests_first(routers: Routers) -> None:
    gangs = Gangs()
    router = routers(ReplicaLimits(replicas=2, min_replicas=1, scale_down_s=0.05))
    await router.start(gangs, slots=8)
    clients = [Client(router, submit(f"r{i}", prompt=[i + 1])) for i in range(2)]
    await eventually(lambda: any(status.state is GangState.DRAINING for status in router.replicas))
    assert not any(gang.stopped for gang in gangs.made)
    await finish(gangs, *clients)
    assert [client.ids for client in clients] == [tokens(gangs[0], client.request) for client in clients]
    await eventually(lambda: len(router.replicas) == 1)


async def test_a_room_that_is_missing_is_asked_for_again(routers: Routers) -> None:
    gangs = Gangs(lambda index: SteppedGang(refuses=index == 1))
    router = routers(ReplicaLimits(min_replicas=1, max_replicas=2, scale_up_s=0.02))
    await router.start(gangs, slots=1)
    for i in range(3):
        Client(router, submit(f"r{i}"))
    await eventually(lambda: len(router.replicas) == 2 and router.replicas[1].state is GangState.SERVING)
    assert len(gangs.made) == 3


async def test_what_it_says_of_itself_is_of_all_replicas(routers: Routers) -> None:
    gangs = Gangs(lambda index: SteppedGang(gang_info=gang_info(max_model_len=256 - index)))
    router = routers(ReplicaLimits(replicas=2))
    with pytest.raises(GangUnavailable, match="starting"):
        _ = router.info
    assert (router.state, router.stats) == (GangState.STARTING, None)
    await router.start(gangs, slots=8)
    assert router.info.model.max_model_len == 255, "what fits the smaller one fits both"
    stats = router.stats
    assert stats is not None
    assert (stats.step, stats.generated_tokens, stats.last_step_seconds) == (14, 26, 0.25)
    assert (stats.pages_in_use, stats.pages_total) == ({"sliding": 4, "full": 6}, {"sliding": 80, "full": 160})


def test_several_starts_are_told_as_one() -> None:
    heard: list[StartProgress] = []
    one, other = StartOfAll(2, heard.append).listeners
    one(StartProgress("placement", 2, 2))
    assert heard == [], "the other one has not begun"
    other(StartProgress("placement", 0, 2, "no room"))
    one(StartProgress("load", 1, 2, "(ready on a)"))
    other(StartProgress("load", 0, 2))
    assert heard == [
        StartProgress("placement", 2, 4, "no room"),
        StartProgress("placement", 2, 4, ""),
        StartProgress("load", 1, 4, ""),
    ]
