"""Programs that Triton compiles are counted: in a server's statistics, and against the times of steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gemray_workers.drafters.controller import DraftLengthController
from gemray_workers.engine.cycle import Cycle, CycleOutput
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.execution import compiled_programs as module
from gemray_workers.execution.compiled_programs import compiled_programs
from gemray_workers.execution.step_clock import HostClock, StepTimes
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.tiny import tiny_checkpoint
from support.engine.engine_runner import engine_config, request


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Triton's knobs with a hook of somebody else's, and a process that has not begun to count."""
    triton: Any = ModuleType("triton")
    triton.knobs = SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None))
    monkeypatch.setitem(sys.modules, "triton", triton)
    jit = SimpleNamespace(serialize_specialization_data=lambda *_: "")
    monkeypatch.setitem(sys.modules, "triton.runtime", cast("ModuleType", SimpleNamespace(jit=jit)))
    module.compiled_programs.cache_clear()
    yield triton.knobs.runtime
    module.compiled_programs.cache_clear()


def test_every_program_counts_and_an_earlier_hook_is_still_called(runtime: SimpleNamespace) -> None:
    seen: list[str] = []
    runtime.jit_post_compile_hook = lambda **program: seen.append(program["key"])
    programs = compiled_programs()
    assert programs.count == 0
    for key in "ab":
        kernel = SimpleNamespace(name="_kernel")
        runtime.jit_post_compile_hook(key=key, repr="", fn=kernel, compile={}, is_manual_warmup=False)
    runtime.jit_post_compile_hook(key="c", already_compiled=True)
    assert programs.count == compiled_programs().count == 2
    assert seen == ["a", "b", "c"]
    assert programs.latest(1) == ["_kernel b"]
    assert programs.latest(2) == ["_kernel a", "_kernel b"]
    assert programs.latest(0) == []


def test_who_listens_hears_of_a_program_before_it_is_compiled(runtime: SimpleNamespace) -> None:
    seen: list[str] = []
    runtime.jit_cache_hook = lambda **program: seen.append(program["key"])
    programs = compiled_programs()
    with programs.heard_by(lambda: seen.append("begins")):
        assert not runtime.jit_cache_hook(key="a", already_compiled=False), "true would keep it from being compiled"
    runtime.jit_cache_hook(key="b", already_compiled=False)
    assert seen == ["begins", "a", "b"]
    assert programs.count == 0


def test_what_compiling_takes_is_added_up(runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    programs = compiled_programs()
    for key in "ab":
        runtime.jit_cache_hook(key=key, already_compiled=False)
        runtime.jit_post_compile_hook(key=key, already_compiled=False)
    runtime.jit_post_compile_hook(key="c", already_compiled=False)  # compiled ahead: nobody has waited
    assert (programs.count, programs.seconds) == (3, 3.5)


def test_programs_of_shapes_and_layouts_are_told_of() -> None:
    """Triton describes a program to its hooks in JSON, and its own layouts have no form there."""
    jit = pytest.importorskip("triton.runtime.jit")
    from triton.experimental.gluon.language import BlockedLayout

    from gemray_kernels.triton.whole_kernel import WholeShape

    compiled_programs()
    constants = {(0,): WholeShape(8, 2, 256, 64, True, 16, 6), (1,): BlockedLayout([1], [32], [4], [0]), (2,): 7}
    target = (SimpleNamespace(),) if "target" in signature(jit.serialize_specialization_data).parameters else ()
    told = jit.serialize_specialization_data("kernel", {}, constants, {}, SimpleNamespace(num_warps=4), "key", *target)
    shape, layout, number = json.loads(told)["constant_vals"]
    assert "window=64" in shape
    assert layout.startswith("BlockedLayout")
    assert number == 7


def test_without_triton_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    module.compiled_programs.cache_clear()
    assert compiled_programs().count == 0
    module.compiled_programs.cache_clear()


def test_a_cycle_knows_whether_it_compiled() -> None:
    clock = HostClock()
    first = clock.start()
    compiled_programs().observe()
    first.verified()
    second = clock.start()
    second.verified()
    compiled_programs().observe()  # between two cycles, as for an admission: neither's time is touched
    assert (first.times().compiled, second.times().compiled) == (True, False)


def test_a_server_tells_programs_compiled_since_it_was_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is compiled before, and one in the third step; that step's time alone is void."""
    compiled_programs().observe()
    decide, learn = Cycle.decide, DraftLengthController.end_step
    decided, void = [], []

    def compiling(*args: Any) -> CycleOutput:
        decided.append(args)
        if len(decided) == 3:
            compiled_programs().observe()
        return decide(*args)

    def end_step(self: DraftLengthController, plan: Any, outcomes: Any, times: StepTimes) -> None:
        void.append(times.compiled)
        learn(self, plan, outcomes, times)

    monkeypatch.setattr(Cycle, "decide", compiling)
    monkeypatch.setattr(DraftLengthController, "end_step", end_step)
    inbox = LocalInbox([request("a", [5, 6, 7], 6)])
    EngineRank(engine_config(tiny_checkpoint("31B")), SoloCommunicator(), torch.device("cpu")).engine(inbox).run()
    counts = [step.stats.compiled_programs for step in inbox.steps]
    assert counts[0] == 0
    assert counts[-1] == 1
    assert [i for i, compiled in enumerate(void) if compiled] == [2]
