"""A supervised gang behind its router: a dead rank costs its requests a pause.

Workers without a model, over plain processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gemray_cluster.gang.client import GangState, GangUnavailable
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.gang import Gang, no_listener
from gemray_cluster.gang.launcher import ProgressListener
from gemray_cluster.gang.replay import FRUITLESS_FAILURES, MOST_FAILURES, LiveRequest, Suspects
from gemray_cluster.gang.router import Router
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_cluster.gang.supervisor import PERIOD_S, Supervisor
from gemray_workers.config import EngineConfig
from gemray_workers.errors import CapacityError
from gemray_workers.messages import SequenceDelta, SpeculationCounters, Submit
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.token_logprob import TokenLogprob
from support.cluster.fake_gang import FakeGang
from support.cluster.fake_worker import DEADLY_PROMPT, HELD, FakeWorker, expected_token
from support.cluster.process_launcher import ProcessLauncher
from support.waiting import HANG_S, eventually

CONFIG = ClusterConfig(
    placement_deadline_s=HANG_S, start_deadline_s=HANG_S, heartbeat_deadline_s=HANG_S, stop_deadline_s=HANG_S
)
SLOTS = 4


def submit(request_id: str, *, max_tokens: int, prompt: list[int] | None = None) -> Submit:
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, max_tokens=max_tokens)
    return Submit(request_id=request_id, prompt_ids=prompt or [1], params=params)


def expected(count: int) -> list[int]:
    return [expected_token(5, position) for position in range(count)]


class Models:
    """Gangs of two ranks, one after the other, each with the next model; the last one's for all that follow."""

    def __init__(self, *models: str) -> None:
        self._models = list(models)

    def __call__(self) -> Gang:
        model = self._models.pop(0) if len(self._models) > 1 else self._models[0]
        engine = EngineConfig(
            model_path=model, tensor_parallel_size=2, dtype="float32", device="cpu", kv_memory_bytes=1,
            collective_timeout_s=HANG_S,
        )  # fmt: skip
        return Gang(ProcessLauncher(engine, FakeWorker), CONFIG, engine, ServedCheckpoints())


class Listener:
    """A client that reads one stream to its end."""

    def __init__(self, router: Router, request: Submit) -> None:
        self.ids: list[int] = []
        self.finish: str | None = None
        self.task = asyncio.create_task(self._listen(router, request))

    async def _listen(self, router: Router, request: Submit) -> None:
        async for delta in router.generate(request):
            assert delta.request_id == request.request_id
            self.ids += delta.token_ids
            self.finish = delta.finish


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    supervised = Router(ReplicaLimits(), max_rebuilds=3)
    yield supervised
    await supervised.stop()


def kill(router: Router, rank: int) -> None:
    os.kill(int(router.info.ranks[rank].host), signal.SIGKILL)  # the fake worker says its process id there


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_rank_costs_a_pause(router: Router, victim: int) -> None:
    assert router.state.value == "starting"
    await router.start(Models("/fake"), slots=SLOTS)
    first = router.info
    listeners = [Listener(router, submit(f"r{i}", max_tokens=300 + i)) for i in range(4)]
    await eventually(lambda: all(len(listener.ids) > 3 for listener in listeners))
    kill(router, victim)

    await eventually(lambda: router.state is not GangState.SERVING)
    states = {router.state}
    while router.state is not GangState.SERVING:
        states.add(router.state)
        await asyncio.sleep(0.01)
    assert states == {GangState.STARTING}, "not FAILED: a restart of the server would not help"
    await eventually(lambda: router.num_rebuilds == 1)  # counted once the launch has returned
    assert router.failure is None
    assert router.info != first

    await asyncio.wait_for(asyncio.gather(*(listener.task for listener in listeners)), HANG_S)
    assert [listener.ids for listener in listeners] == [expected(300 + i) for i in range(4)]
    assert {listener.finish for listener in listeners} == {"length"}


def test_a_replay_says_how_many_prompt_logprobs_are_out() -> None:
    request = LiveRequest(submit("r", max_tokens=9, prompt=[1, 2, 3, 4, 5, 6]))
    request.take(SequenceDelta(request_id="r", token_ids=[], prompt_logprobs=[TokenLogprob(2, -1.0)] * 2))
    assert (request.rest.num_prompt_logprobs, request.rest.emitted_ids) == (2, [])
    request.take(SequenceDelta(request_id="r", token_ids=[7], prompt_logprobs=[TokenLogprob(2, -1.0)] * 3))
    assert (request.rest.num_prompt_logprobs, request.rest.emitted_ids) == (5, [7])


async def test_new_requests_are_refused_while_it_is_rebuilt(router: Router, tmp_path: Path) -> None:
    may_load = tmp_path / "may load"
    await router.start(Models("/fake", f"{HELD}{may_load}"), slots=SLOTS)
    kill(router, 1)
    # What its peer saw may be told first.
    await eventually(lambda: (router.failure or "").startswith("rank 1: its process died"))
    with pytest.raises(GangUnavailable, match=r"the gang is starting: rank 1: its process died"):
        await Listener(router, submit("new", max_tokens=1)).task
    assert router.info.model.vocab_size == 1000, "what is served has not changed"
    assert router.seconds_since_heartbeat == 0.0
    may_load.touch()
    await eventually(lambda: router.state is GangState.SERVING)
    served = Listener(router, submit("new", max_tokens=3))
    await served.task
    assert served.ids == expected(3)


async def test_without_rebuilds_the_first_failure_is_final() -> None:
    router = Router(ReplicaLimits(), max_rebuilds=0)
    await router.start(Models("/fake"), slots=SLOTS)
    listener = Listener(router, submit("x", max_tokens=10**6))
    await eventually(lambda: len(listener.ids) > 0)
    kill(router, 1)
    with pytest.raises(GangUnavailable, match=r"the gang failed: rank 1: its process died"):
        await asyncio.wait_for(listener.task, HANG_S)
    assert await asyncio.wait_for(router.wait_ended(), HANG_S) is GangState.FAILED
    assert router.failure is not None
    assert router.failure.startswith("rank 1: its process died")
    await router.stop()
    assert router.state is GangState.FAILED


async def test_a_request_that_kills_every_gang_ends_and_the_others_go_on(router: Router) -> None:
    await router.start(Models("/fake"), slots=SLOTS)
    others = [Listener(router, submit(f"other{i}", max_tokens=200)) for i in range(3)]
    await eventually(lambda: all(len(other.ids) > 0 for other in others))
    deadly = Listener(router, submit("deadly", max_tokens=5, prompt=DEADLY_PROMPT))
    with pytest.raises(GangUnavailable):
        await asyncio.wait_for(deadly.task, HANG_S)
    await asyncio.wait_for(asyncio.gather(*(other.task for other in others)), HANG_S)
    assert [other.ids for other in others] == [expected(200)] * 3
    assert router.num_rebuilds == FRUITLESS_FAILURES + 1


async def test_a_gang_that_cannot_start_again_says_both_reasons(router: Router) -> None:
    await router.start(Models("/fake", "/missing"), slots=SLOTS)
    listener = Listener(router, submit("x", max_tokens=10**6))
    await eventually(lambda: len(listener.ids) > 0)
    kill(router, 0)
    with pytest.raises(GangUnavailable, match=r"could not be rebuilt: /missing/config\.json: no such file .*rank 0"):
        await asyncio.wait_for(listener.task, HANG_S)
    assert await router.wait_ended() is GangState.FAILED


@pytest.mark.parametrize("obstacle", ["/dies", "/no-room", "/late"])
async def test_what_keeps_a_new_gang_from_serving_may_pass(router: Router, obstacle: str) -> None:
    """A rank that dies, memory that is not free yet, a barrier that a rank does not reach: tried again, and counted."""
    await router.start(Models("/fake", obstacle, "/fake"), slots=SLOTS)
    listener = Listener(router, submit("x", max_tokens=200))
    await eventually(lambda: len(listener.ids) > 0)
    kill(router, 0)
    await asyncio.wait_for(listener.task, HANG_S)
    assert listener.ids == expected(200)
    assert router.num_rebuilds == 1


async def test_what_does_not_pass_ends_it_after_max_rebuilds() -> None:
    router = Router(ReplicaLimits(), max_rebuilds=2)
    await router.start(Models("/fake", "/no-room"), slots=SLOTS)
    kill(router, 0)
    assert await asyncio.wait_for(router.wait_ended(), HANG_S) is GangState.FAILED
    assert router.failure == "weights of 9 GiB do not fit the 3 GiB that are free"
    await router.stop()


class FragileLauncher(ProcessLauncher):
    """Processes on a ground that can be taken away; rank 1 lives on a while, as a worker of a dead Ray does."""

    ground: asyncio.Event

    async def lost(self) -> str:
        await self.ground.wait()
        return "the raylet of our own Ray has ended"


async def test_when_what_the_ranks_run_on_dies_nothing_is_waited_for() -> None:
    grounds: list[asyncio.Event] = []

    def make() -> Gang:
        engine = EngineConfig(
            model_path="/fake", tensor_parallel_size=2, dtype="float32", device="cpu", kv_memory_bytes=1,
            collective_timeout_s=HANG_S,
        )  # fmt: skip
        launcher = FragileLauncher(engine, FakeWorker)
        launcher.ground = asyncio.Event()
        grounds.append(launcher.ground)
        return Gang(launcher, CONFIG, engine, ServedCheckpoints())

    router = Router(ReplicaLimits(), max_rebuilds=3)
    await router.start(make, slots=SLOTS)
    listener = Listener(router, submit("x", max_tokens=300))
    await eventually(lambda: len(listener.ids) > 3)
    grounds[0].set()
    await eventually(lambda: router.failure is not None)
    assert router.failure == "the raylet of our own Ray has ended"
    # A gang that starts is not waited for either.
    await eventually(lambda: len(grounds) == 2)
    grounds[1].set()
    await asyncio.wait_for(listener.task, HANG_S)
    assert listener.ids == expected(300)
    assert (len(grounds), router.num_rebuilds) == (3, 1)
    await router.stop()


async def test_a_gang_bears_the_name_of_its_replica() -> None:
    supervisor, gang = Supervisor(max_rebuilds=0, name="replica 1"), DyingGang()
    await supervisor.start(lambda: gang)
    assert gang.name == "replica 1"
    gang.ended.set()
    await supervisor.stop()


class DyingGang(FakeGang):
    """Serves at once, fails when told, and takes its time to end."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    async def launch(self, progress: ProgressListener = no_listener) -> None:
        pass

    async def wait_ended(self) -> GangState:
        await self.ended.wait()
        return self.state

    def fail(self, reason: str) -> None:
        self.state, self.failure = GangState.FAILED, reason


async def test_clients_are_told_the_newest_failure_while_its_gang_still_ends() -> None:
    """Ending takes a second; until then it was the failure before that they heard of."""
    gangs: list[DyingGang] = []

    def make() -> DyingGang:
        gangs.append(DyingGang())
        return gangs[-1]

    router = Router(ReplicaLimits(), max_rebuilds=3)
    await router.start(make, slots=SLOTS)
    gangs[0].fail("the first reason")
    gangs[0].ended.set()
    await eventually(lambda: router.num_rebuilds == 1)
    heard = [router.failure]
    gangs[1].fail("the second reason")
    assert [*heard, router.failure] == [None, "the second reason"]
    with pytest.raises(GangUnavailable, match=r"^the gang is starting: the second reason$"):
        await Listener(router, submit("new", max_tokens=1)).task
    gangs[1].ended.set()
    await router.stop()


class CostlyGang(DyingGang):
    """Takes 100 s to launch, and finds no room if told so."""

    def __init__(self, clock: list[float], *, has_room: bool) -> None:
        super().__init__()
        self._clock, self._has_room = clock, has_room

    async def launch(self, progress: ProgressListener = no_listener) -> None:
        self._clock[0] += 100
        if not self._has_room:
            self.fail("no room")
            self.ended.set()
            raise CapacityError("no room")


async def test_the_log_says_how_long_a_gang_was_away_over_all_attempts(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    gangs = [CostlyGang(clock, has_room=has_room) for has_room in (True, False, True, True)]
    router = Router(ReplicaLimits(), max_rebuilds=3, clock=lambda: clock[0])
    await router.start(iter(gangs).__next__, slots=SLOTS)
    for number, failing in enumerate((gangs[0], gangs[2]), 1):
        failing.fail("gone")
        failing.ended.set()
        await eventually(lambda count=number: router.num_rebuilds == count)  # type: ignore[misc]
    away = [line.partition(";")[0] for line in caplog.messages if "serves again" in line]
    assert away == ["the gang serves again after 200.0 s", "the gang serves again after 100.0 s"]
    await router.stop()


async def test_stopping_breaks_a_rebuild_off(router: Router) -> None:
    await router.start(Models("/fake", "/slow"), slots=SLOTS)
    listener = Listener(router, submit("x", max_tokens=10**6))
    await eventually(lambda: len(listener.ids) > 0)
    kill(router, 0)
    await eventually(lambda: router.failure is not None)
    await asyncio.sleep(1.0)
    await asyncio.wait_for(router.stop(), HANG_S)
    assert router.state is GangState.STOPPED
    with pytest.raises(GangUnavailable):
        await asyncio.wait_for(listener.task, HANG_S)


async def test_old_failures_are_forgotten() -> None:
    now = 0.0
    router = Router(ReplicaLimits(), max_rebuilds=1, clock=lambda: now)
    await router.start(Models("/fake"), slots=SLOTS)
    for round_number in range(2):
        kill(router, 1)
        await eventually(lambda count=round_number + 1: router.num_rebuilds == count)  # type: ignore[misc]
        now += PERIOD_S + 1
    kill(router, 1)
    await eventually(lambda: router.num_rebuilds == 3)
    kill(router, 1)
    assert await asyncio.wait_for(router.wait_ended(), HANG_S) is GangState.FAILED
    await router.stop()


def test_a_live_request_is_replayed_with_what_it_got() -> None:
    def delta(ids: list[int], rounds: int) -> SequenceDelta:
        counters = SpeculationCounters(
            rounds=rounds, drafted=4, accepted=3, accepted_per_position=[2] + [1] * (rounds - 1)
        )
        return SequenceDelta(request_id="x", token_ids=ids, speculation=counters)

    live = LiveRequest(submit("x", max_tokens=9))
    assert live.rest.emitted_ids == []
    live.take(delta([7], 1))
    live.take(delta([8, 9], 2))
    assert live.survives_failure()
    assert live.rest.emitted_ids == [7, 8, 9]
    counters = live.take(delta([10], 3)).speculation
    assert counters == SpeculationCounters(rounds=5, drafted=8, accepted=6, accepted_per_position=[4, 2, 1])
    assert [live.survives_failure() for _ in range(FRUITLESS_FAILURES + 1)] == [True] * FRUITLESS_FAILURES + [False]


def test_a_request_is_ended_by_its_eighth_failure_whatever_it_got() -> None:
    live = LiveRequest(submit("x", max_tokens=99))
    survived = []
    for token in range(MOST_FAILURES):
        live.take(SequenceDelta(request_id="x", token_ids=[token]))
        survived.append(live.survives_failure())
        assert not live.is_suspect
    assert survived == [True] * (MOST_FAILURES - 1) + [False]


def test_log_probabilities_of_its_prompt_clear_no_suspect() -> None:
    """A gang may die of the prompt's rows behind them: only a token is a fruit."""
    live = LiveRequest(submit("x", max_tokens=9))
    for _ in range(FRUITLESS_FAILURES):
        live.take(SequenceDelta(request_id="x", token_ids=[], prompt_logprobs=[TokenLogprob(1, -1.0)]))
        assert live.survives_failure()
    assert live.is_suspect
    live.take(SequenceDelta(request_id="x", token_ids=[3]))
    assert not live.is_suspect


async def test_suspects_join_one_after_the_other() -> None:
    suspects = Suspects()
    first, second, innocent = (LiveRequest(submit(name, max_tokens=9)) for name in "abc")
    for request in (first, second):
        for _ in range(FRUITLESS_FAILURES):
            assert request.survives_failure()
        assert request.is_suspect
    await suspects.wait_for_turn(innocent)
    await suspects.wait_for_turn(first)
    waiting = asyncio.create_task(suspects.wait_for_turn(second))
    suspects.clear(innocent)
    suspects.clear(second)
    await asyncio.sleep(0.01)
    assert not waiting.done(), "it is the first one's turn"
    suspects.clear(first)
    await asyncio.wait_for(waiting, HANG_S)
    second.take(SequenceDelta(request_id="b", token_ids=[1]))
    assert not second.is_suspect
