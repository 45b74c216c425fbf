"""What reaches the adaptive draft length: the load of the running batch, the whole time of a step, and its sums."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemray_workers.drafters import controller as controller_module
from gemray_workers.drafters.controller import DraftLengthController
from gemray_workers.drafters.draft_length import Estimates, Load
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.execution.step_clock import StepTimes
from gemray_workers.messages import EngineStats
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import ScheduledRows, StepPlan
from gemray_workers.scheduling.request import Sequence
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant
from support.engine.engine_runner import engine_config, request
from support.engine.host_calls import CountOperations
from support.oracles.oracle import CPU

MOST = 4


def sequences(contexts: list[int]) -> list[Sequence]:
    """That decode, in slots of their own."""
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=9)
    return [
        Sequence(
            request_id=str(slot),
            params=params,
            tokens=[1] * (context + 1),
            prompt_len=context,
            arrival=slot,
            num_computed=context,
            slot=slot,
        )
        for slot, context in enumerate(contexts)
    ]


def run(controller: DraftLengthController, contexts: list[int], dear: float, steps: int, cheap: float = 0.0) -> int:
    """Step with right drafts, each of which costs `dear` seconds of drafting; the length of the last step."""
    k = -1
    for step in range(steps):
        running = sequences(contexts)
        controller.begin_step(running)
        k = controller(running[0]).number
        rows = [
            ScheduledRows(slot=s.running_slot, start=s.num_computed, num_known=1, num_drafts=k, samples=True)
            for s in running
        ]
        outcomes = [SequenceOutcome(r.slot, [1] * (k + 1), k, k) for r in rows]
        times = StepTimes(draft=dear * k, verify=1.0 + cheap * k)
        controller.end_step(StepPlan(step=step, scheduled=rows), outcomes, times)
    return k


def test_the_load_is_that_of_the_running_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Load] = []

    def choose(_estimates: Estimates, load: Load, most: int) -> int:
        seen.append(load)
        return most

    monkeypatch.setattr(controller_module, "choose_draft_length", choose)
    controller = DraftLengthController({"mtp": MOST}, adaptive=True)
    for contexts in ([100], [100] * 9, [100_000], [1000, 3000]):
        controller.begin_step(sequences(contexts))
    assert seen == [Load.of(1, 100), Load.of(9, 100), Load.of(1, 100_000), Load.of(2, 2000)]
    assert len(set(seen)) == 4


@pytest.mark.parametrize("other", [[100_000], [100] * 9])
def test_what_pays_under_one_load_does_not_decide_another(other: list[int]) -> None:
    """Drafts that cost nothing with one short sequence, and ten steps with a long one or with many."""
    controller = DraftLengthController({"mtp": MOST}, adaptive=True)
    assert run(controller, [100], 0.0, 20) == MOST
    assert run(controller, other, 10.0, 20) == 0
    assert run(controller, [100], 0.0, 1) == MOST


def test_the_time_of_drafting_counts() -> None:
    assert run(DraftLengthController({"mtp": MOST}, adaptive=True), [100], 0.0, 20) == MOST
    assert run(DraftLengthController({"mtp": MOST}, adaptive=True), [100], 2.0, 20) == 0


def test_the_time_of_verifying_counts() -> None:
    assert run(DraftLengthController({"mtp": MOST}, adaptive=True), [100], 0.0, 20, cheap=2.0) == 0


def served(drafter: Path | None, monkeypatch: pytest.MonkeyPatch) -> EngineStats:
    """Statistics after one request on the tiny target, by a clock that tells operations in place of seconds."""
    target = tiny_checkpoint("31B")
    config = engine_config(target, drafter_path=None if drafter is None else str(drafter))
    inbox = LocalInbox([request("a", [5, 6, 7], 20)])
    engine = EngineRank(config, SoloCommunicator(), CPU).engine(inbox)
    with CountOperations() as operations, monkeypatch.context() as patch:
        patch.setattr("gemray_workers.execution.step_clock.time.perf_counter", operations.count.total)
        engine.run()
    return inbox.steps[-1].stats


def test_a_servers_time_is_measured_by_drafting_and_verifying(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = served(tiny_assistant(tiny_checkpoint("31B")), monkeypatch)
    plain = served(None, monkeypatch)
    assert plain.verify_seconds > 0
    assert drafting.verify_seconds > 0
    assert plain.draft_seconds < 0.05 * plain.verify_seconds
    assert drafting.draft_seconds > 0.1 * drafting.verify_seconds
