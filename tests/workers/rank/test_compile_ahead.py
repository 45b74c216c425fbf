"""Compiling ahead: what a start launches is noted, nothing runs and nothing stays, and no failure ends a start."""

from __future__ import annotations

import gc
import json
import logging
import threading
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gemray_workers.config import EngineConfig
from gemray_workers.engine.buckets import bucket
from gemray_workers.execution import cycle_rows
from gemray_workers.execution.cycle_rows import CyclePlan, CycleShape
from gemray_workers.execution.programs_ahead import Program, compile_side_by_side, noted_programs
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator, silenced
from gemray_workers.rank.compile_ahead import Rehearsal, compile_ahead, plans_ahead
from gemray_workers.rank.graph_buckets import graph_buckets
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.sampling.features import Features
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config
from support.engine.gpu import CONFIGS
from support.engine.whole_warm_up import whole_warm_up
from support.kernels.pretended_card import forget_programs, pretended_card

CPU = torch.device("cpu")


def settings(shape: Shape, make: Any = None, numerics: str = "fast") -> EngineConfig:
    target = tiny_checkpoint(shape)
    return engine_config(
        target,
        drafter_path=None if make is None else str(make(target)),
        dtype="bfloat16",
        numerics=numerics,
        max_num_seqs=16,
        max_step_tokens=256,
        prefill_chunk=32,
        page_size=16,
        poison_freed_pages=False,
    )


def identities(programs: list[Program]) -> set[tuple[str, Any]]:
    return {(program.name, program.arguments[0]) for program in programs}


def all_plans(rehearsal: Rehearsal) -> list[CyclePlan]:
    """Those of graphs and warm-up."""
    few, others, _ = plans_ahead(rehearsal.blueprint)
    return [*few, *others]


def plans_of_a_warm_up(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> list[CyclePlan]:
    """As it would run on a card, without sequences: a rehearsal has none."""
    ran: list[CyclePlan] = []
    of = CyclePlan.of

    def noted(*args: Any) -> CyclePlan:
        ran.append(of(*args))
        return ran[-1]

    with monkeypatch.context() as patched, whole_warm_up():
        patched.setattr(cycle_rows.CyclePlan, "of", noted)
        EngineRank(replace(config, numerics="fast"), SoloCommunicator(), CPU).warm_up()
    return list(dict.fromkeys(_hashable(plan) for plan in ran))


def _hashable(plan: CyclePlan) -> CyclePlan:
    """As it runs kernel by kernel."""
    return CyclePlan((), plan.shape, plan.features.in_few_programs())


def tensors_in_memory() -> list[torch.Tensor]:
    """All that the process holds: those of ranks among them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what isinstance asks of torch's deprecated names
        return [o for o in gc.get_objects() if type(o) is torch.Tensor and o.device == CPU]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: numbers of every dtype that other tests have left, and those that are none, can be compared so."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Rehearsed:
    """A rehearsal of all that a start launches, and what it did to what was there."""

    programs: set[tuple[str, Any]]
    num_tensors: int
    num_changed: int
    """Tensors that were in memory before and are others now."""
    num_fake: int
    """Fake tensors that are left."""


@cache
def rehearsed(shape: Shape, make: Any, numerics: str) -> Rehearsed:
    """Once for all tests of a rank with these settings: a rehearsal of all plans takes ten seconds."""
    with pretended_card():
        rank = EngineRank(settings(shape, make, numerics), SoloCommunicator(), CPU)
        before = [(tensor, tensor.clone()) for tensor in tensors_in_memory()]
        rehearsal = rank.rehearsal()
        programs = identities(rehearsal.programs(all_plans(rehearsal)))
        changed = sum(not torch.equal(bits(tensor), bits(was)) for tensor, was in before)
        gc.collect()
        return Rehearsed(programs, len(before), changed, sum(isinstance(o, FakeTensor) for o in gc.get_objects()))


STARTS = pytest.mark.parametrize(
    ("shape", "make", "numerics"),
    [
        ("31B", None, "fast"),
        ("31B", tiny_assistant, "fast"),
        ("26B-A4B", tiny_dflash, "fast"),
        ("E4B", None, "fast"),
        ("31B", None, "exact"),
    ],
)


@pytest.mark.slow
@STARTS
def test_all_that_a_start_launches_is_noted(
    shape: Shape, make: Any, numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(shape, make, numerics)
    warm_up = plans_of_a_warm_up(config, monkeypatch)
    ahead = rehearsed(shape, make, numerics).programs
    every: set[tuple[str, Any]] = set()
    with pretended_card():
        rehearsal = EngineRank(config, SoloCommunicator(), CPU).rehearsal()
        captured = [CyclePlan([], *key) for key in graph_buckets(rehearsal.blueprint)]
        # Every plan by itself. Every layer runs once for each shape: layers know nothing of features.
        whole = replace(rehearsal, one_layer_a_kind=nullcontext)
        shapes: set[CycleShape] = set()
        for plan in [*captured, *warm_up]:
            every |= identities((rehearsal if plan.shape in shapes else whole).programs([plan]))
            shapes.add(plan.shape)
    assert len(every) > 20
    assert every <= ahead, every - ahead


@STARTS
def test_a_rehearsal_changes_nothing_and_leaves_nothing(shape: Shape, make: Any, numerics: str) -> None:
    found = rehearsed(shape, make, numerics)
    assert found.programs
    assert found.num_tensors > 50
    assert not found.num_changed
    assert not found.num_fake


@pytest.mark.slow
def test_exact_products_of_a_chunk_of_any_length_are_noted() -> None:
    """Chunks of requests that no graph is captured for have rows of their own."""
    config = replace(settings("31B", numerics="exact"), prefill_chunk=256)
    with pretended_card():
        rehearsal = EngineRank(config, SoloCommunicator(), CPU).rehearsal()
        ahead = identities(rehearsal.programs([plan for plans in plans_ahead(rehearsal.blueprint) for plan in plans]))
        chunks = [CyclePlan([], bucket(1, (), rows), Features()) for rows in (65, 81, 127, 129, 161, 193)]
        products = {program for program in identities(rehearsal.programs(chunks)) if "rows_kernel" in program[0]}
    assert products
    assert products <= ahead, products - ahead


def packed_experts(directory: Path, num_experts: int) -> EngineConfig:
    """A model whose experts are packed layers of their own on disk; its weights are random."""
    config = json.loads((tiny_checkpoint("26B-A4B") / "config.json").read_text())
    config["text_config"]["num_experts"] = num_experts
    published = json.loads((CONFIGS / "26B-A4B-it-w8a16" / "config.json").read_text())
    config["quantization_config"] = published["quantization_config"]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return replace(settings("26B-A4B"), model_path=str(directory), random_weights=True)


def test_a_rehearsal_looks_at_no_expert_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at a tensor takes a fake one a millisecond, and 26B-A4B has 11,520 experts' weights."""
    dispatched = {4: 0, 16: 0}
    dispatch = FakeTensorMode.dispatch
    for num_experts in dispatched:

        def counted(*args: Any, num_experts: int = num_experts, **kwargs: Any) -> Any:
            dispatched[num_experts] += 1
            return dispatch(*args, **kwargs)

        config = packed_experts(tmp_path / str(num_experts), num_experts)
        with pretended_card():
            first, second = (EngineRank(config, SoloCommunicator(), CPU).rehearsal() for _ in range(2))
            plans = plans_ahead(first.blueprint)[0]
            first.programs(plans)  # shapes that torch has never seen take more
            with monkeypatch.context() as patched:
                patched.setattr(FakeTensorMode, "dispatch", counted)
                assert second.programs(plans)
    assert dispatched[16] == dispatched[4] > 0


def few_programs(rank: EngineRank) -> list[Program]:
    """Those of small kernels, which compile fast."""
    rehearsal = rank.rehearsal()
    programs = rehearsal.programs([plans_ahead(rehearsal.blueprint)[0][0]])
    small = ("_cut_kernel", "_advance_kernel", "_embed_kernel", "_settle_kernel")
    return [program for program in programs if program.name in small]


def test_programs_are_compiled_once_for_the_process_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pretended_card():
        rank = EngineRank(settings("31B"), SoloCommunicator(), CPU)
        programs = few_programs(rank)
        assert len(programs) == 4
        result = compile_side_by_side(programs, 2, part=1, parts=3)
        assert (result.num_compiled, result.num_found, result.failures) == (4, 0, ())
        assert not few_programs(rank), "the first launch finds them"
        forget_programs()
        assert identities(few_programs(rank)) == identities(programs)
        result = compile_side_by_side(programs, 2)
        assert (result.num_compiled, result.num_found, result.failures) == (0, 4, ())


def test_triton_reads_its_own_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hashes them for the first key of its cache, hundreds of megabytes, and does not see others do so."""
    from triton.compiler import compiler
    from triton.runtime import cache

    counting, calls = threading.Lock(), []
    key_of = compiler.get_cache_key

    def get_cache_key(*args: Any, **kwargs: Any) -> Any:
        with counting:
            calls.append(cache.triton_key.cache_info().currsize)
        return key_of(*args, **kwargs)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "get_cache_key", get_cache_key)
    with pretended_card():
        programs = few_programs(EngineRank(settings("31B"), SoloCommunicator(), CPU))
        cache.triton_key.cache_clear()
        compile_side_by_side(programs, 4)
    assert calls == [0, 1, 1, 1]


def test_a_program_that_cannot_be_compiled_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pretended_card():
        rank = EngineRank(settings("31B"), SoloCommunicator(), CPU)
        programs = few_programs(rank)
        key, signature, *others = programs[0].arguments
        broken = replace(programs[0], arguments=(key, dict.fromkeys(signature, "*nothing"), *others))
        result = compile_side_by_side([broken, *programs[1:]], 2)
        assert result.num_compiled == 3
        assert len(result.failures) == 1
        assert programs[0].name in result.failures[0]
        assert identities(few_programs(rank)) == identities(programs[:1])


def test_nothing_is_launched_meanwhile_compiled_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.compiler import CompiledKernel

    with pretended_card():
        rank = EngineRank(settings("31B"), SoloCommunicator(), CPU)
        programs = few_programs(rank)
        compile_side_by_side(programs, 2)
        launched: list[Any] = []
        monkeypatch.setattr(CompiledKernel, "run", property(launched.append))
        few_programs(rank)
        assert not launched


def log_of(rehearsal: Rehearsal, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.INFO):
        compile_ahead(rehearsal, ranks_here=1)
    return caplog.text


def test_a_start_goes_on_when_nothing_can_be_rehearsed(caplog: pytest.LogCaptureFixture) -> None:
    def stage() -> Any:
        raise RuntimeError("no slots today")

    with pretended_card():
        rank = EngineRank(settings("31B"), SoloCommunicator(), CPU)
        text = log_of(replace(rank.rehearsal(), stage=stage), caplog)
    assert "no slots today" in text
    assert "compiled 0 programs ahead" in text


def test_nothing_is_rehearsed_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton import knobs

    with pretended_card():
        rehearsal = EngineRank(settings("31B"), SoloCommunicator(), CPU).rehearsal()
        monkeypatch.setattr(knobs.runtime, "interpret", True)
        monkeypatch.setattr(Rehearsal, "programs", lambda *_: pytest.fail("rehearsed"))
        assert "compiled 0 programs ahead" in log_of(rehearsal, caplog)


def test_other_graphs_are_not_rehearsed_where_the_first_programs_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rehearsed: list[int] = []

    class Few(Rehearsal):
        def programs(self, plans: Any) -> list[Program]:
            rehearsed.append(len(plans))
            return few_programs(rank) if len(rehearsed) == 1 else []

    with pretended_card():
        rank = EngineRank(settings("31B"), SoloCommunicator(), CPU)
        own = rank.rehearsal()
        few = Few(own.rank, own.blueprint, own.device, own.stage, own.one_layer_a_kind, own.silenced)
        assert "compiled 4 programs ahead" in log_of(few, caplog)
        assert len(rehearsed) == 3, "first a few plans, then the others, then those that no graph holds"
        caplog.clear()
        rehearsed.clear()
        forget_programs()
        text = log_of(few, caplog)
        assert "compiled 0 programs ahead" in text
        assert "found 4 in the cache" in text
        assert len(rehearsed) == 2, "no others"


def test_launches_are_launches_again_after_a_failure() -> None:
    from triton.runtime.jit import JITFunction

    before = JITFunction.run, JITFunction._do_compile
    with pytest.raises(ValueError, match="in between"), noted_programs():
        raise ValueError("in between")
    assert (JITFunction.run, JITFunction._do_compile) == before


def test_a_silenced_communicator_exchanges_nothing() -> None:
    class Refusing:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} of a group")

    group = cast(Any, Refusing())
    comm = TorchCommunicator(0, 2, cast(Any, None), group, group, CPU, timedelta(seconds=1))
    x = torch.arange(6.0).view(2, 3)
    with silenced(comm):
        assert comm.all_reduce(x).shape == (2, 3)
        assert comm.all_gather(x).shape == (2, 2, 3)
        assert comm.all_reduce_tree(torch.zeros(4, 2, 3), torch.bfloat16).dtype == torch.bfloat16
        assert comm.all_reduce_tree(torch.zeros(1, 1 << 17), torch.float32).shape == (1 << 17,)
    with pytest.raises(AssertionError, match="of a group"):
        comm.all_reduce(x)
