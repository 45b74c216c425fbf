"""Gangs without processes that give tokens when they are told to, and clients of a router over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from gemray_cluster.gang.client import GangState, GangUnavailable
from gemray_cluster.gang.gang import no_listener
from gemray_cluster.gang.launcher import ProgressListener, StartProgress
from gemray_cluster.gang.router import Router
from gemray_workers.errors import CapacityError
from gemray_workers.messages import SequenceDelta, Submit
from gemray_workers.sampling.params import SamplingParams
from support.cluster.fake_gang import FakeGang
from support.waiting import eventually


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


async def all_get_a_token(gangs: Gangs, clients: Sequence[Client]) -> None:
    """Step until each has got one more."""
    before = [len(client.ids) for client in clients]
    while not all(len(client.ids) > count for client, count in zip(clients, before, strict=True)):
        await gangs.step()
        await asyncio.sleep(0)


Routers = Callable[..., Router]
"""Makes a router of some limits; the fixture ``routers`` is one."""


async def given(router: Router, gangs: Gangs, *requests: Submit) -> list[int]:
    """The gang that each request went to; all stay live."""
    places = []
    for request in requests:
        before = [len(gang.submitted) for gang in gangs.made]
        Client(router, request)
        await eventually(lambda before=before: [len(g.submitted) for g in gangs.made] != before)  # type: ignore[misc]
        places.append(next(i for i, gang in enumerate(gangs.made) if len(gang.submitted) > before[i]))
    return places
