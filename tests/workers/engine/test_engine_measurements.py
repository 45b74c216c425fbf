"""What measurements ask of an engine: the device's gap between cycles, the experts chosen, another lag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.errors import InvalidField
from gemray_workers.execution.step_clock import HostClock
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.tiny import tiny_checkpoint
from support.engine.engine_runner import engine_config, request

CPU = torch.device("cpu")
REQUESTS = [request("a", [5, 6, 7], 6), request("b", [9], 6, temperature=1.0, top_k=20, seed=3)]


def test_a_gap_lies_between_two_cycles_and_no_rest_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 2.0, 4.0, 4.5, 4.5, 5.0, 90.0, 91.0, 92.0])
    monkeypatch.setattr("gemray_workers.execution.step_clock.time.perf_counter", lambda: next(times))
    clock, gaps = HostClock(), []
    for _ in range(3):
        marks = clock.start()
        marks.drafted()
        marks.verified()
        gaps.append(marks.times().gap)
        if len(gaps) == 2:
            clock.rest()
    assert gaps == [0.0, 0.5, 0.0]


@pytest.mark.parametrize("lag", [0, 1])
def test_the_statistics_sum_up_gaps(lag: int) -> None:
    rank = EngineRank(engine_config(tiny_checkpoint("31B"), lag=1), SoloCommunicator(), CPU)
    inbox = LocalInbox(list(REQUESTS))
    rank.engine(inbox, lag=lag).run()
    gaps = [step.stats.gap_seconds for step in inbox.steps]
    assert gaps == sorted(gaps)
    assert 0 < gaps[-1] < 60


def test_no_more_lag_than_there_is_room_for() -> None:
    rank = EngineRank(engine_config(tiny_checkpoint("31B"), lag=0), SoloCommunicator(), CPU)
    with pytest.raises(InvalidField, match="lag = 1 is not allowed: at most the configured 0"):
        rank.engine(LocalInbox([]), lag=1)


def test_watched_layers_tell_the_experts_of_every_row() -> None:
    rank = EngineRank(engine_config(tiny_checkpoint("26B-A4B")), SoloCommunicator(), CPU)
    seen: list[Tensor] = []

    def ids(**options: Any) -> dict[str, list[int]]:
        inbox = LocalInbox(list(REQUESTS))
        rank.engine(inbox, **options).run()
        return {r.request_id: [t for d in inbox.deltas if d.request_id == r.request_id for t in d.token_ids]
                for r in REQUESTS}  # fmt: skip

    watched = ids(on_experts=lambda experts_TK: seen.append(experts_TK.clone()))
    moe = rank._blueprint.model.moe
    assert moe is not None
    count = len(seen)
    assert count
    assert count % len(rank._blueprint.model.layers) == 0
    assert {tensor.shape[1] for tensor in seen} == {moe.top_k}
    assert seen[0].shape[0] == 4, "the first step's rows: both prompts"
    assert all(int(t.min()) >= 0 and int(t.max()) < moe.num_experts for t in seen)
    assert ids() == watched
    assert len(seen) == count, "the next engine is not watched"
