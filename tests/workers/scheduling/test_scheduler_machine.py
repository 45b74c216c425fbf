"""The scheduler under random load: whatever happens around a request, it gets the ids that it gets alone.

With lag 1 a step is planned and run before the host learns what the one before it gave. The made-up device runs plans
in order and looks at every key that a row reads, so it notices a page that was granted anew too early, a window that
was given back under rows in flight, and rows without pages. Requests stop, fault, are cancelled and preempted, and now
and then the gang fails: another goes on with what had been given out, and what was in flight is lost.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import msgspec
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gemray_workers.kv.block_table import most_pages
from gemray_workers.kv.prefix_cache import chained_hash
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.messages import SequenceDelta, Submit
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import StepPlan
from gemray_workers.scheduling.request import Sequence
from gemray_workers.scheduling.scheduler import Scheduler, SchedulerConfig
from gemray_workers.scheduling.shares import Drafts
from support.scheduling.fake_engine import STOP_ID, FakeEngine, oracle, token_at

MAX_LEN = 48


@dataclass
class Flight:
    """A plan that has run and is not committed."""

    plan: StepPlan
    outcomes: list[SequenceOutcome]
    names: dict[int, str]
    """Request by slot."""
    live: set[int]
    """Slots that no later plan has released."""


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        max_num_seqs = data.draw(st.sampled_from([4, 5, 3, 2, 1]), "max_num_seqs")
        max_drafts = data.draw(st.integers(0, 4), "num_draft_tokens")
        least_rows = max_num_seqs * (1 + max_drafts)
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_step_tokens=least_rows + data.draw(st.integers(0, 24), "spare rows"),
            prefill_chunk=data.draw(st.sampled_from([1, 3, 7, 16, 64]), "prefill_chunk"),
            max_model_len=MAX_LEN,
            num_draft_tokens=max_drafts,
            admission_headroom=data.draw(st.sampled_from([0, 0, 4, 16]), "headroom"),
            lag=data.draw(st.integers(0, 1), "lag"),
            tells_freed_pages=True,
            prefix_cache=data.draw(st.booleans(), "prefix cache"),
        )
        window = data.draw(st.sampled_from([1, 4, 7, 16]), "window")
        sizes = [2, 4] if self.config.prefix_cache else [1, 2, 4]
        page = data.draw(st.sampled_from(sizes), "page")
        self.collide = data.draw(st.booleans(), "hashes are equal")
        self.specs = [
            KVGroupSpec("sliding", (0,), 1, 8, page, window, torch.float32),
            KVGroupSpec("full", (1,), 1, 8, page if self.config.prefix_cache else 4, None, torch.float32),
        ]
        self.num_pages = {
            spec.name: most_pages(MAX_LEN, spec.page_size, spec.window, self.config.max_rows)
            + data.draw(st.sampled_from([3, 0, 8, 40]), "spare pages")
            for spec in self.specs
        }
        self.salt = data.draw(st.integers(0, 1 << 30), "acceptance")
        self.matches_stop_ids = data.draw(st.booleans(), "device matches stop ids")
        self.faulty: set[str] = set()
        self.reported: dict[str, list[int]] = {}
        self.start()
        self.submits: dict[str, Submit] = {}
        self.ids: dict[str, list[int]] = {}
        self.finals: dict[str, SequenceDelta] = {}
        self.prompt_logprobs: dict[str, list[float]] = {}
        self.cancelled: set[str] = set()
        self.work = 0

    def start(self) -> None:
        """A gang without requests."""
        self.scheduler = Scheduler(
            self.config,
            self.specs,
            self.num_pages,
            lambda seq: Drafts(token_at(self.salt, seq.arrival, 6)),
            hash_block=(lambda _before, _ids: 0) if self.collide else chained_hash,
        )
        self.engine = FakeEngine(
            self.specs,
            lambda request_id, position, n: token_at(self.salt, int(request_id) * 1000 + position, n + 1),
            faults=self.faulty,
            max_model_len=MAX_LEN,
            prefix_cache=self.config.prefix_cache,
            matches_stop_ids=self.matches_stop_ids,
            reported_prompt_positions=self.reported,
        )
        self.in_flight: deque[Flight] = deque()
        self.num_admissions: Counter[int] = Counter()
        self.num_received = 0
        self.life_finals: list[SequenceDelta] = []

    @precondition(lambda self: self.live and not self.cancelled & self.live)
    @rule()
    def fail(self) -> None:
        """The gang fails, whatever is in flight, and the coordinator replays what lives to another."""
        assert self.scheduler.stats(0.0).generated_tokens == self.num_received
        self.start()
        for request_id in sorted(self.live, key=int):
            submit = self.submits[request_id]
            given = submit.num_prompt_logprobs + len(self.prompt_logprobs[request_id])
            replay = msgspec.structs.replace(submit, emitted_ids=self.ids[request_id], num_prompt_logprobs=given)
            self.scheduler.submit(replay)
            self.work += len(submit.prompt_ids) + submit.params.max_tokens + 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fault(self, data: st.DataObject) -> None:
        """From the next step on a request's logits are unusable."""
        self.faulty.add(data.draw(st.sampled_from(sorted(self.live)), "faulty"))

    @rule(data=st.data(), count=st.integers(1, 5))
    def submit_some(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.submit(data)

    def submit(self, data: st.DataObject) -> None:
        request_id = str(len(self.submits))
        seed = data.draw(st.integers(0, 1 << 30), "seed")
        prompt_len = data.draw(st.integers(1, data.draw(st.sampled_from([8, 40]), "longest")), "prompt_len")
        prompt_ids = [*self.beginning(data)[:prompt_len]]
        prompt_ids += [token_at(~seed, position) for position in range(len(prompt_ids), prompt_len)]
        params = SamplingParams(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=seed,
            max_tokens=data.draw(st.sampled_from([1, 10, 25, 40]), "max_tokens"),
            min_tokens=data.draw(st.sampled_from([0, 0, 5]), "min_tokens"),
            stop_token_ids=data.draw(st.sampled_from([(), (), (STOP_ID,), (STOP_ID, 1, 2)]), "stops"),
            num_draft_tokens=data.draw(st.sampled_from([None, 0, 2]), "k"),
            prompt_logprobs=data.draw(st.sampled_from([None, 0]), "prompt_logprobs"),
        )
        submit = Submit(request_id=request_id, prompt_ids=prompt_ids, params=params)
        whole, _ = oracle(submit, MAX_LEN)
        emitted = whole[: data.draw(st.sampled_from([0, 0, 0, 0, 1, len(whole) // 2, len(whole)]), "emitted")]
        # Before the first token some of the prompt's log-probabilities may be out, with it all are.
        given = prompt_len - 1 if emitted else data.draw(st.integers(0, prompt_len - 1), "prompt logprobs given")
        self.submits[request_id] = Submit(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            emitted_ids=emitted,
            num_prompt_logprobs=0 if params.prompt_logprobs is None else given,
        )
        self.prompt_logprobs[request_id] = []
        self.ids[request_id] = list(emitted)
        self.scheduler.submit(self.submits[request_id])
        self.work += len(prompt_ids) + params.max_tokens + 1

    def beginning(self, data: st.DataObject) -> list[int]:
        """What the prompt of a new request begins with: most often a request before it and what that got so far."""
        if not self.config.prefix_cache or not self.submits:
            return []
        earlier = data.draw(st.sampled_from([*self.submits]), "goes on from")
        return [*self.submits[earlier].prompt_ids, *self.ids[earlier]]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)), "cancelled")
        self.cancelled.add(request_id)
        self.scheduler.cancel(request_id)

    @rule(count=st.integers(1, 12))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.in_flight or not self.scheduler.running, "nothing was planned although sequences run"
            plan = StepPlan(step=self.scheduler.step)
        self.check_plan(plan)
        self.check_oldest(plan)
        for flight in self.in_flight:
            flight.live -= set(plan.released)
        self.num_admissions.update(admission.slot for admission in plan.admitted)
        for rows in plan.scheduled:
            assert rows.epoch == self.num_admissions[rows.slot] - 1, "rows are of the sequence that has the slot now"
        names = {rows.slot: self.scheduler_id(rows.slot) for rows in plan.scheduled}
        self.in_flight.append(Flight(plan, self.engine.run(plan), names, set(names)))
        wants_logprobs = any(rows.prompt_logprobs_from is not None for rows in plan.scheduled)
        while len(self.in_flight) > (self.config.lag if plan.scheduled and not wants_logprobs else 0):
            self.commit(self.in_flight.popleft())
        for sequence in self.scheduler.running:
            self.check_window(sequence)

    def check_oldest(self, plan: StepPlan) -> None:
        """It advances in every step, unless what is in flight already ends it."""
        if self.scheduler.running:
            oldest = self.scheduler.running[0]
            is_ending = oldest.least_len >= oldest.end_len(MAX_LEN)
            assert is_ending or oldest.slot in {rows.slot for rows in plan.scheduled}, (
                "the oldest sequence does not advance"
            )

    def commit(self, flight: Flight) -> None:
        """Whatever still has its slot, and nothing else, gets what its rows gave."""
        expected = {
            flight.names[rows.slot]
            for rows in flight.plan.scheduled
            if rows.samples and rows.slot in flight.live and flight.names[rows.slot] not in self.finals
        }
        expected -= {flight.names[outcome.slot] for outcome in flight.outcomes if outcome.fault is not None}
        deltas = self.scheduler.commit(flight.plan, flight.outcomes)
        assert {delta.request_id for delta in deltas if delta.token_ids} == expected
        for delta in deltas:
            self.receive(delta)

    def check_plan(self, plan: StepPlan) -> None:
        assert sum(rows.num_known + rows.num_drafts for rows in plan.scheduled) <= self.config.max_step_tokens
        assert len({rows.slot for rows in plan.scheduled}) == len(plan.scheduled)
        for rows in plan.scheduled:
            assert 1 <= rows.num_known <= self.config.prefill_chunk
            assert 0 <= rows.num_drafts <= self.config.num_draft_tokens
            params = self.submits[self.scheduler_id(rows.slot)].params
            assert params.num_draft_tokens is None or rows.num_drafts <= params.num_draft_tokens

    def scheduler_id(self, slot: int) -> str:
        return next(sequence.request_id for sequence in self.scheduler.running if sequence.slot == slot)

    def check_window(self, sequence: Sequence) -> None:
        """Between steps a sliding group holds the window, the rows in flight, and the pages of rejected drafts."""
        num_computed = sequence.num_computed
        for spec in self.specs:
            held = len(self.scheduler.ledger.pages_of(sequence.running_slot)[spec.name])
            rejected = (1 + self.config.lag) * self.config.num_draft_tokens  # of two steps that are committed at once
            reach = num_computed + sequence.num_rows_in_flight + rejected
            first = 0 if spec.window is None else max(0, num_computed - spec.window)
            assert held <= -(-reach // spec.page_size) - first // spec.page_size

    def receive(self, delta: SequenceDelta) -> None:
        request_id = delta.request_id
        assert request_id not in self.finals, "a delta after the last one"
        assert delta.token_ids or delta.prompt_logprobs or delta.finish, "an empty delta"
        assert not delta.prompt_logprobs or not self.ids[request_id], "a prompt's log-probability behind a token"
        self.prompt_logprobs[request_id] += [entry.logprob for entry in delta.prompt_logprobs or []]
        if delta.logprobs is not None:
            assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
        self.ids[request_id] += delta.token_ids
        self.num_received += len(delta.token_ids)
        if delta.finish is not None:
            self.finals[request_id] = delta
            self.life_finals.append(delta)

    @property
    def live(self) -> set[str]:
        return self.submits.keys() - self.finals.keys()

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps <= self.work + 2 * len(self.submits) + 1, "some request starves"
        self.scheduler.check_integrity()
        assert not any(self.scheduler.ledger.pages_in_use.values())
        assert self.finals.keys() == self.submits.keys()
        for request_id, submit in self.submits.items():
            self.check_result(request_id, submit)
        stats = self.scheduler.stats(0.0)
        assert stats.generated_tokens == self.num_received
        per_request = [final.speculation for final in self.life_finals if final.speculation is not None]
        assert len(per_request) == len(self.life_finals)
        assert stats.speculation.drafted == sum(counters.drafted for counters in per_request)
        assert stats.speculation.accepted == sum(counters.accepted for counters in per_request)

    def check_result(self, request_id: str, submit: Submit) -> None:
        ids, finish = oracle(submit, MAX_LEN)
        final = self.finals[request_id]
        if final.finish == "cancelled":
            assert request_id in self.cancelled
            assert self.ids[request_id] == ids[: len(self.ids[request_id])]
            return
        if final.finish == "fault":
            assert request_id in self.faulty
            assert self.ids[request_id] == ids[: len(self.ids[request_id])]
            return
        assert self.ids[request_id] == ids
        assert final.finish == finish
        assert final.matched_stop_id == (ids[-1] if finish == "stop_token" else None)
        if submit.params.prompt_logprobs is not None:
            positions = list(range(1 + submit.num_prompt_logprobs, len(submit.prompt_ids)))
            assert self.prompt_logprobs[request_id] == [-float(position) for position in positions]
            assert self.engine.reported_prompt_positions.get(request_id, []) == positions


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestSchedulerMachine = SchedulerMachine.TestCase
