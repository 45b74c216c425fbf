"""Where a rank's step plans come from (rank 0 schedules and sends, the others receive), and how each applies them.

The two planners have the same verbs, so that `Engine.step` reads the same on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from gemray_workers.drafters.controller import DraftLengthController
from gemray_workers.drafters.protocol import Drafter
from gemray_workers.engine.grammar_queue import GrammarQueue
from gemray_workers.engine.observations import QueueObserver, StepObserver
from gemray_workers.errors import InvalidField
from gemray_workers.execution.compiled_programs import compiled_programs
from gemray_workers.execution.slots import SlotTable
from gemray_workers.execution.step_clock import StepTimes
from gemray_workers.grammar.run import GrammarRun, Words
from gemray_workers.kv.pool import KVPools
from gemray_workers.messages import (
    Cancel,
    EngineStats,
    FromGang,
    SequenceDelta,
    StepOutput,
    Stop,
    Submit,
    ToGang,
)
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import StepPlan
from gemray_workers.scheduling.scheduler import Scheduler

_GRAMMAR_POLL_S = 0.002
"""How often an engine without other work looks whether a grammar is compiled."""


class Inbox(Protocol):
    """Where requests come from and results go: the channel to the coordinator, or a list in a test."""

    def poll(self, timeout_s: float) -> list[ToGang]:
        """All messages that have arrived; waits up to `timeout_s` for a first one."""
        ...

    def send(self, message: FromGang) -> None:
        """Send without waiting for the receiver."""
        ...


class Planner(Protocol):
    """The control side of a step."""

    @property
    def learns(self) -> bool:
        """Whether `commit` wants to know what the rows gave."""
        ...

    def schedule(self) -> StepPlan:
        """The next plan; may be empty (a heartbeat). Waits while there is nothing to do."""
        ...

    def commit(self, plan: StepPlan, outcomes: Sequence[SequenceOutcome], times: StepTimes) -> list[SequenceDelta]:
        """Turn what the rows gave into what each request gets; `times` is what the step took."""
        ...

    def allowed(self, slot: int, drafts: Sequence[int], num_words: int) -> Words:
        """Which ids may come next in a slot and behind each draft, by grammar and bad words; on rank 0 alone."""
        ...

    def publish(self, deltas: list[SequenceDelta]) -> None:
        """Hand the step's results to the coordinator."""
        ...


class LeadPlanner:
    """Rank 0: takes requests, schedules, tells the peers, publishes."""

    learns = True

    def __init__(
        self,
        scheduler: Scheduler,
        comm: Communicator,
        inbox: Inbox,
        draft_lengths: DraftLengthController,
        grammars: GrammarQueue,
        *,
        heartbeat_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With no requests; programs compiled from now on count as compiled while serving."""
        self._scheduler = scheduler
        self._comm = comm
        self._inbox = inbox
        self._draft_lengths = draft_lengths
        self._grammars = grammars
        self._draft_seconds = self._verify_seconds = self._gap_seconds = 0.0
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._ended: list[SequenceDelta] = []  # before they reached the scheduler
        self._stopping = False
        self._num_programs_at_start = compiled_programs().count
        self._step_began = clock()
        self._steps = StepObserver(clock)
        self._queue = QueueObserver(clock)
        self._was_idle = True

    def schedule(self) -> StepPlan:
        """Take what has arrived, decide the step and broadcast it; idle waits end with an empty plan."""
        self._receive(0.0 if self._scheduler.has_work else self._heartbeat_s)
        self._step_began = self._clock()
        self._steps.begin()
        plan = self._plan()
        self._queue.admit(plan)
        self._comm.broadcast_bytes(self._encoder.encode(plan))
        return plan

    def commit(self, plan: StepPlan, outcomes: Sequence[SequenceOutcome], times: StepTimes) -> list[SequenceDelta]:
        """Move lengths, free pages, apply stops and budgets."""
        self._draft_lengths.end_step(plan, outcomes, times)
        self._draft_seconds += times.draft
        self._verify_seconds += times.verify
        self._gap_seconds += times.gap
        deltas = self._scheduler.commit(plan, list(outcomes))
        self._steps.commit(plan)
        self._check_when_idle()
        ended, self._ended = self._ended, []
        return [self._with_wait(delta) for delta in ended + deltas]

    def publish(self, deltas: list[SequenceDelta]) -> None:
        """One message with every sequence's new tokens and the engine's statistics."""
        self._inbox.send(StepOutput(deltas, self._stats()))

    def allowed(self, slot: int, drafts: Sequence[int], num_words: int) -> Words:
        """As `allowed_words`, of the running sequence."""
        sequence = next(seq for seq in self._scheduler.running if seq.slot == slot)
        return sequence.allowed(drafts, num_words)

    def _plan(self) -> StepPlan:
        self._draft_lengths.begin_step(self._scheduler.running)
        plan = self._scheduler.schedule()
        if plan is None:
            plan = StepPlan(step=self._scheduler.step)
        if self._stopping and not self._scheduler.has_work:
            plan = msgspec.structs.replace(plan, stop=True)
        return plan

    def _receive(self, timeout_s: float) -> None:
        """Wait for messages, and no longer than for a grammar that is being compiled."""
        until = self._clock() + timeout_s
        while True:
            left = until - self._clock()
            wait_s = min(left, _GRAMMAR_POLL_S) if self._grammars else left
            messages = self._inbox.poll(max(0.0, wait_s))
            for message in messages:
                self._take(message)
            compiled = list(self._grammars.ready())
            for submit, grammar in compiled:
                self._submit(submit, grammar)
            if messages or compiled or left <= 0 or not self._grammars:
                return

    def _take(self, message: ToGang) -> None:
        match message:
            case Submit():
                self._queue.arrive(message.request_id)
                if message.params.grammar is None:
                    self._submit(message, None)
                elif message.request_id in self._grammars:
                    self._refuse(message, InvalidField("request_id", message.request_id, "an id that nobody has"))
                else:
                    self._grammars.put(message)
            case Cancel(request_id):
                if self._grammars.drop(request_id):
                    self._ended.append(SequenceDelta(request_id=request_id, token_ids=[], finish="cancelled"))
                else:
                    self._scheduler.cancel(request_id)
            case Stop():
                self._stopping = True
                for request_id in self._grammars.drop_all():
                    self._ended.append(SequenceDelta(request_id=request_id, token_ids=[], finish="cancelled"))
                self._scheduler.cancel_all()

    def _submit(self, submit: Submit, grammar: GrammarRun | InvalidField | None) -> None:
        """The coordinator refuses what can never run; should one slip through, it ends alone."""
        try:
            if isinstance(grammar, InvalidField):
                raise grammar
            self._scheduler.submit(submit, grammar)
        except InvalidField as error:
            self._refuse(submit, error)

    def _refuse(self, submit: Submit, error: InvalidField) -> None:
        self._ended.append(SequenceDelta(request_id=submit.request_id, token_ids=[], finish="fault", fault=str(error)))

    def _with_wait(self, delta: SequenceDelta) -> SequenceDelta:
        waited = self._queue.take_wait(delta)
        return delta if waited is None else msgspec.structs.replace(delta, queue_seconds=waited)

    def _check_when_idle(self) -> None:
        """When the last sequence leaves, every page must be back in its pool."""
        idle = not self._scheduler.has_work
        if idle and not self._was_idle:
            self._scheduler.check_integrity()
        self._was_idle = idle

    def _stats(self) -> EngineStats:
        stats = self._scheduler.stats(last_step_seconds=self._clock() - self._step_began)
        return msgspec.structs.replace(
            stats,
            draft_seconds=self._draft_seconds,
            verify_seconds=self._verify_seconds,
            gap_seconds=self._gap_seconds,
            step_seconds=self._steps.seconds.distribution(),
            batch_sizes=self._steps.batch_sizes.distribution(),
            compiled_programs=compiled_programs().count - self._num_programs_at_start,
        )


class FollowPlanner:
    """Ranks 1 and up: carry out rank 0's plans."""

    learns = False
    """What follows from a step comes with a later plan."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def schedule(self) -> StepPlan:
        """Wait for rank 0's next plan, at most the group's deadline."""
        return self._decoder.decode(self._comm.broadcast_bytes(None))

    def commit(self, plan: StepPlan, outcomes: Sequence[SequenceOutcome], times: StepTimes) -> list[SequenceDelta]:
        """Nothing: what follows from the outcomes comes with the next plan."""
        return []

    def allowed(self, slot: int, drafts: Sequence[int], num_words: int) -> Words:
        """Refuse: rank 0 sends masks."""
        raise NotImplementedError(f"rank 0 makes the masks of slot {slot}")

    def publish(self, deltas: list[SequenceDelta]) -> None:
        """Nothing: rank 0 speaks for the gang."""


def apply_plan(plan: StepPlan, drafter: Drafter, slots: SlotTable, poisoned: Iterable[KVPools]) -> None:
    """Forget the sequences that have left their slots, and bring the slot table to where the plan says.

    Args:
        plan: of this step.
        drafter: told of each slot that is free or gets another sequence.
        slots: the sequences.
        poisoned: pools whose freed pages are filled with NaN; none outside of debugging.
    """
    for slot in (*plan.released, *(admission.slot for admission in plan.admitted)):
        drafter.reset(slot)
    slots.apply(plan)
    for pools in poisoned:
        pools.poison(plan.freed_pages)
