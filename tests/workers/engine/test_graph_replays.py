"""Which graphs a plan replays. CUDA's part is made up: a graph holds the names of what was enqueued meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gemray_workers.engine.buckets import PUBLISHED, Key, bucket, buckets
from gemray_workers.engine.graphs import Captures, GraphedCycle
from gemray_workers.engine.prompt_room import PromptRoom
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.sampling.features import Features
from gemray_workers.sampling.row_masks import MakeMasks
from gemray_workers.scheduling.plan import ScheduledRows
from support.engine.random_plans import plan_of

NULL_SLOT = 12


class _Graph:
    def __init__(self) -> None:
        self.held: list[str] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class _Stream:
    def wait_stream(self, _other: Any) -> None:
        """Nothing runs beside anything."""


class _NotedCycle:
    """A `CycleRunner` that notes what it is asked, in the graph that is captured or beside all."""

    def __init__(self) -> None:
        self.eager: list[str] = []
        self.graph: _Graph | None = None

    def _note(self, verb: str) -> None:
        (self.eager if self.graph is None else self.graph.held).append(verb)

    def fit(self, plan: CyclePlan) -> CyclePlan:
        return plan

    def draft(self, plan: CyclePlan, table_S6: Tensor) -> None:
        self._note("draft")

    def decide(self, plan: CyclePlan, table_S6: Tensor, masks: MakeMasks | None = None) -> str:
        self._note("decide")
        return f"output of {plan.shape.num_rows} rows"


@pytest.fixture
def cycle(monkeypatch: pytest.MonkeyPatch) -> _NotedCycle:
    noted = _NotedCycle()

    @contextmanager
    def graph(captured: _Graph, **_how: Any) -> Iterator[None]:
        noted.graph = captured
        yield
        noted.graph = None

    for name, stand_in in (
        ("CUDAGraph", _Graph),
        ("graph", graph),
        ("graph_pool_handle", lambda: None),
        ("Stream", lambda _device: _Stream()),
        ("current_stream", lambda _device: _Stream()),
        ("stream", lambda _stream: nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return noted


def graphed(cycle: _NotedCycle, keys: list[Key]) -> GraphedCycle[str]:
    return GraphedCycle(
        cycle,
        keys,
        null_slot=NULL_SLOT,
        device=torch.device("cpu"),
        captures=Captures(),
        give_up=lambda output: output,
    )


def decoding(slot: int, num_drafts: int) -> ScheduledRows:
    return ScheduledRows(slot, 40, 1, num_drafts, True)


def prompts_end(slot: int, num_rows: int) -> ScheduledRows:
    return ScheduledRows(slot, 0, num_rows, 0, True)


def greedy(*scheduled: ScheduledRows) -> CyclePlan:
    return plan_of(scheduled, Features())


def replays(runner: GraphedCycle[str], plan: CyclePlan) -> dict[str, int]:
    """How often the halves of the plan's graph are replayed in its cycle, by what they hold."""
    fitted = runner.fit(plan)
    captured = runner._captured[fitted.shape, fitted.features]
    graphs = [cast(_Graph, graph) for graph in (captured.draft, captured.decide) if graph is not None]
    before = [graph.num_replays for graph in graphs]
    table_S6 = fitted.table(NULL_SLOT)
    runner.draft(fitted, table_S6)
    assert runner.decide(fitted, table_S6) == captured.output
    assert torch.equal(captured.table_S6, table_S6)
    return {", ".join(graph.held): graph.num_replays - count for graph, count in zip(graphs, before, strict=True)}


ROOM = PromptRoom.of(chunk=256, step_rows=512, worthwhile=4096)


@pytest.mark.parametrize("others", [0, 3, 8, 11])
def test_a_plan_without_drafts_drafts_nothing_in_a_graph_that_has_room_for_them(
    cycle: _NotedCycle, others: int
) -> None:
    """A prompt's end of two rows takes few rows beside a batch, fewer than graphs without drafts have for it."""
    runner = graphed(cycle, buckets(max_num_seqs=12, num_draft_tokens=(4,), prompts=ROOM))
    plan = greedy(prompts_end(0, 2), *(decoding(1 + i, 0) for i in range(others)))
    assert runner.fit(plan).shape.max_drafts > 0
    assert replays(runner, plan) == {"draft": 0, "decide": 1}


def test_a_plan_with_drafts_replays_both_halves(cycle: _NotedCycle) -> None:
    runner = graphed(cycle, [(bucket(4, (4,)), PUBLISHED)])
    for plan in (greedy(decoding(0, 4)), greedy(decoding(0, 0), decoding(1, 1), decoding(2, 0))):
        assert replays(runner, plan) == {"draft": 1, "decide": 1}


def test_a_graph_without_drafts_has_one_half(cycle: _NotedCycle) -> None:
    runner = graphed(cycle, [(bucket(4, ()), PUBLISHED)])
    assert replays(runner, greedy(decoding(0, 0), decoding(1, 0))) == {"decide": 1}


def test_a_plan_that_no_graph_holds_runs_kernel_by_kernel(cycle: _NotedCycle) -> None:
    runner = graphed(cycle, [(bucket(1, ()), PUBLISHED)])
    plan = greedy(decoding(0, 2), decoding(1, 2))
    fitted = runner.fit(plan)
    runner.draft(fitted, fitted.table(NULL_SLOT))
    runner.decide(fitted, fitted.table(NULL_SLOT))
    assert cycle.eager == ["draft", "decide"]
