"""Replicas as one gang: which one gets a request, and where it goes on. Gangs without processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import msgspec
import pytest

from gemray_cluster.gang.client import GangState, GangUnavailable, ReplicaStatus
from gemray_cluster.gang.gang import no_listener
from gemray_cluster.gang.launcher import ProgressListener, StartProgress
from gemray_cluster.gang.prefix_affinity import BLOCK_TOKENS
from gemray_cluster.gang.router import Router
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.gang.start_of_all import StartOfAll
from gemray_workers.errors import CapacityError
from gemray_workers.messages import SequenceDelta, Submit
from gemray_workers.sampling.params import SamplingParams
from support.cluster.fake_gang import FakeGang, gang_info
from support.waiting import HANG_S, eventually


def submit(request_id: str = "r", *, prompt: list[int] | None = None, max_tokens: int = 20) -> Submit:
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, max_tokens=max_tokens)
    return Submit(request_id=request_id, prompt_ids=prompt or [1], params=params)


def tokens(gang: FakeGang, request: Submit) -> list[int]:
    return [token for delta in gang._deltas(request) for token in delta.token_ids]


class SteppedGang(FakeGang):
    """Gives a token of each request when it is told to step; fails, refuses to start or waits to when told to."""

    def __init__(self, *, refuses: bool = False, gate: asyncio.Event | None = None, **fields: object) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]
        self._gate = gate
        self.refuses = refuses
        self.stopped = False
        self._stepped = asyncio.Condition()
        self._steps = 0
        self._ended = asyncio.Event()

    async def launch(self, progress: ProgressListener = no_listener) -> None:
        if self.refuses:
            self.state, self.failure = GangState.FAILED, "no room"
            raise CapacityError("no room")
        if self._gate is not None:
            self.state = GangState.STARTING
            await self._gate.wait()
            self.state = GangState.SERVING
        progress(StartProgress("ready", 1, 1))

    async def wait_ended(self) -> GangState:
        await self._ended.wait()
        return self.state

    async def stop(self) -> None:
        self.stopped = True
        if self.state is GangState.SERVING:
            self.state = GangState.STOPPED
        self._ended.set()

    async def step(self) -> None:
        async with self._stepped:
            self._steps += 1
            self._stepped.notify_all()

    async def fail(self, reason: str = "rank 1 died") -> None:
        self.state, self.failure = GangState.FAILED, reason
        self._ended.set()
        await self.step()

    async def generate(self, request: Submit) -> AsyncGenerator[SequenceDelta, None]:
        whole = tokens(self, msgspec.structs.replace(request, emitted_ids=[]))
        done = len(request.emitted_ids)
        assert request.emitted_ids == whole[:done], "a replay says what is out"
        self.submitted.append(request)
        self.num_active += 1
        seen = self._steps
        try:
            while done < len(whole):
                async with self._stepped:
                    await self._stepped.wait_for(lambda seen=seen: self._steps > seen)  # type: ignore[misc]
                    seen = self._steps
                if self.state is not GangState.SERVING:
                    raise GangUnavailable(f"the gang is {self.state.value}")
                done += 1
                finish = "length" if done == len(whole) else None
                yield SequenceDelta(request_id=request.request_id, token_ids=[whole[done - 1]], finish=finish)  # type: ignore[arg-type]
        finally:
            self.num_active -= 1


class Gangs:
    """Makes gangs and keeps them, in order."""

    def __init__(self, make: Callable[[int], SteppedGang] = lambda _: SteppedGang()) -> None:
        self.made: list[SteppedGang] = []
        self._make = make

    def __call__(self) -> SteppedGang:
        self.made.append(self._make(len(self.made)))
        return self.made[-1]

    def __getitem__(self, index: int) -> SteppedGang:
        return self.made[index]

    async def step(self) -> None:
        for gang in self.made:
            await gang.step()


class Client:
    """Reads one stream."""

    def __init__(self, router: Router, request: Submit) -> None:
        self.ids: list[int] = []
        self.request = request
        self.task = asyncio.create_task(self._read(router))

    async def _read(self, router: Router) -> None:
        async with aclosing(router.generate(self.request)) as deltas:
            async for delta in deltas:
                self.ids += delta.token_ids


async def finish(gangs: Gangs, *clients: Client) -> None:
    """Step until all have ended; raises what a client met."""
    while not all(client.task.done() for client in clients):
        await gangs.step()
        await asyncio.sleep(0)
    for client in clients:
        await client.task


@pytest.fixture
async def routers() -> AsyncIterator[Callable[..., Router]]:
    made: list[Router] = []

    def make(limits: ReplicaLimits, **options: object) -> Router:
        made.append(Router(limits, **{"max_rebuilds": 3, "tick_s": 0.01, "retry_s": 0.01, **options}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for router in made:
        await router.stop()


Routers = Callable[..., Router]


async def given(router: Router, gangs: Gangs, *requests: Submit) -> list[int]:
    """The gang that each request went to; all stay live."""
    places = []
    for request in requests:
        before = [len(gang.submitted) for gang in gangs.made]
        Client(router, request)
        await eventually(lambda before=before: [len(g.submitted) for g in gangs.made] != before)  # type: ignore[misc]
        places.append(next(i for i, gang in enumerate(gangs.made) if len(gang.submitted) > before[i]))
    return places


async def test_requests_go_to_the_least_loaded_in_turns(routers: Routers) -> None:
    gangs, router = Gangs(), routers(ReplicaLimits(replicas=3))
    await router.start(gangs, slots=8)
    places = await given(router, gangs, *(submit(f"r{i}", prompt=[i + 1]) for i in range(9)))
    assert sorted(places[:3]) == [0, 1, 2]
    assert places == places[:3] * 3
    assert [status.num_live for status in router.replicas] == [3, 3, 3]


async def test_a_known_beginning_attracts_until_the_load_says_otherwise(routers: Routers) -> None:
    gangs, router = Gangs(), routers(ReplicaLimits(replicas=2))
    await router.start(gangs, slots=16)  # two requests more than the least loaded are borne
    document = [9] * 3 * BLOCK_TOKENS
    places = await given(router, gangs, *(submit(f"r{i}", prompt=[*document, i]) for i in range(6)))
    home = places[0]
    assert places == [home] * 3 + [1 - home] * 3, "from the fourth on both know it, and the load decides"


async def test_a_failed_gangs_requests_go_on_at_once_in_another(routers: Routers) -> None:
    gate = asyncio.Event()
    gangs = Gangs(lambda index: SteppedGang(gate=gate if index >= 2 else None))
    router = routers(ReplicaLimits(replicas=2))
    await router.start(gangs, slots=8)
    clients = [Client(router, submit(f"r{i}", prompt=[i + 1])) for i in range(4)]
    await eventually(lambda: [len(gang.submitted) for gang in gangs.made] == [2, 2])
    while not all(client.ids for client in clients):
        await gangs.step()
        await asyncio.sleep(0)
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
    """Fails when it is given the request ``deadly``."""

    async def generate(self, request: Submit) -> AsyncGenerator[SequenceDelta, None]:
        if request.request_id == "deadly":
            self.submitted.append(request)
            await self.fail("killed")
            raise GangUnavailable("the gang is failed")
        async for delta in super().generate(request):
            yield delta


async def test_a_deadly_request_takes_three_gangs_the_last_of_them_alone(routers: Routers) -> None:
    """Its second failure makes it a suspect, which waits for a gang of its own while the others go on."""
    gate = asyncio.Event()
    gangs = Gangs(lambda index: MortalGang(gate=gate if index == 3 else None))
    router = routers(ReplicaLimits(replicas=2))
    await router.start(gangs, slots=64)
    clients = [Client(router, submit(f"r{i}", prompt=[i + 1])) for i in range(4)]
    await eventually(lambda: [len(gang.submitted) for gang in gangs.made] == [2, 2])
    while not all(client.ids for client in clients):
        await gangs.step()
        await asyncio.sleep(0)
    deadly = Client(router, submit("deadly"))
    await eventually(lambda: len(gangs.made) == 4 and len(gangs[2].submitted) == 4)
    for _ in range(3):
        await gangs.step()
        await asyncio.sleep(0.01)
    assert [gang.state for gang in gangs.made[:2]] == [GangState.FAILED] * 2
    assert {request.request_id for request in gangs[2].submitted} == {"r0", "r1", "r2", "r3"}
    assert not deadly.task.done(), "it waits for the second gang to be built"
    gate.set()
    with pytest.raises(GangUnavailable):
        await deadly.task
    assert [request.request_id for request in gangs[3].submitted] == ["deadly"]
    await finish(gangs, *clients)
    assert [client.ids for client in clients] == [tokens(gangs[2], client.request) for client in clients]
    await eventually(lambda: router.num_rebuilds == 3)
    assert gangs[2].state is GangState.SERVING, "the gang that the others use has not failed"


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
    clients.append(Client(router, submit("late", prompt=[77])))
    await eventually(lambda: len(gangs[1].submitted) == 1)
    await finish(gangs, *clients)
    await eventually(lambda: len(router.replicas) == 1)
    assert [gang.stopped for gang in gangs.made].count(True) == 1
    client = Client(router, submit("last"))
    await finish(gangs, client)
    assert client.ids == tokens(gangs[0], client.request)


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
