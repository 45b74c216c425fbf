"""Cycles as CUDA graphs: the ids of cycles that run kernel by kernel."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from gemray_workers.engine.graphs import GraphedCycle
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.sampling.verify import verify
from support.checkpoints.tiny import VOCAB_SIZE, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config, request, serve
from support.engine.gpu import needs_gpus

pytestmark = pytest.mark.gpu

DRAFTERS: dict[str, Any] = {"none": None, "mtp": tiny_assistant, "dflash": tiny_dflash}
SAMPLERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "suppress_tokens": (5, 9)},
    {"temperature": 0.8, "top_k": 10, "seed": 2**63 + 11},
    {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.3},
)


def submits(count: int, samplers: tuple[dict[str, Any], ...]) -> list[Submit]:
    rng = random.Random(4)
    return [
        request(
            f"r{i}",
            [rng.randrange(3, VOCAB_SIZE) for _ in range(1 + 9 * i)],
            rng.randrange(8, 40),
            num_draft_tokens=rng.choice((None, None, 0, 2)),
            **samplers[i % len(samplers)],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("method", ["none", "mtp", "dflash"])
@pytest.mark.parametrize("shape", ["31B", "26B-A4B", "E4B"])
def test_float32_ids_are_those_of_eager_cycles(shape: Shape, method: str) -> None:
    needs_gpus(1)
    make = DRAFTERS[method]
    directory = tiny_checkpoint(shape)
    changes = {} if make is None else {"drafter_path": str(make(directory)), "num_draft_tokens": 4}
    runs = []
    for eager in (True, False):
        config = engine_config(
            directory, dtype="float32", device="cuda", max_num_seqs=4, enforce_eager=eager, **changes
        )
        rank = EngineRank(config, SoloCommunicator(), torch.device("cuda", 0))
        assert isinstance(rank._runner(rank._drafter, verify), GraphedCycle) != eager
        runs.append([serve(rank, SoloCommunicator(), submits(9, samplers)) for samplers in (SAMPLERS[:3], SAMPLERS)])
    for eager_run, graph_run in zip(*runs, strict=True):
        assert eager_run is not None
        assert graph_run is not None
        assert graph_run.ids == eager_run.ids
        assert graph_run.speculation == eager_run.speculation


@pytest.mark.parametrize("shape", ["31B", "26B-A4B", "E4B"])
def test_long_prompts_in_graphs_have_the_ids_of_eager_cycles(shape: Shape) -> None:
    """Chunks that fill a graph, leave some of it empty, come alone and beside others' decoding."""
    needs_gpus(1)
    directory = tiny_checkpoint(shape)
    rng = random.Random(5)
    lengths = (640, 1500, 30, 700, 1024, 9)
    runs = []
    asked = [
        request(f"r{i}", [rng.randrange(3, VOCAB_SIZE) for _ in range(length)], 20, **SAMPLERS[i % 3])
        for i, length in enumerate(lengths)
    ]
    for eager in (True, False):
        config = engine_config(
            directory, dtype="float32", device="cuda", max_num_seqs=4, enforce_eager=eager, max_model_len=2048,
            max_step_tokens=1024, prefill_chunk=1024,
        )  # fmt: skip
        rank = EngineRank(config, SoloCommunicator(), torch.device("cuda", 0))
        runner = rank._runner(rank._drafter, verify)
        assert isinstance(runner, GraphedCycle) != eager
        if isinstance(runner, GraphedCycle):
            assert max(shape.num_rows for shape, _ in runner._captured) == 1024
        runs.append([serve(rank, SoloCommunicator(), group) for group in (asked[:1], asked)])
    for eager_run, graph_run in zip(*runs, strict=True):
        assert eager_run is not None
        assert graph_run is not None
        assert graph_run.ids == eager_run.ids


@pytest.mark.parametrize("method", ["none", "mtp"])
def test_outputs_of_graphs_lie_over_each_other_and_are_read_in_time(method: str) -> None:
    """Log-probabilities are read from the logits of one graph before the next one, of another shape, writes there."""
    needs_gpus(1)
    directory = tiny_checkpoint("31B")
    make = DRAFTERS[method]
    changes = {} if make is None else {"drafter_path": str(make(directory)), "num_draft_tokens": 4}
    asked = [
        request(f"r{i}", [5 + i, 6, 7], 5 + 4 * i, logprobs=3, prompt_logprobs=2, **SAMPLERS[i % 3]) for i in range(6)
    ]
    reports = []
    for eager in (True, False):
        config = engine_config(
            directory, dtype="float32", device="cuda", max_num_seqs=4, enforce_eager=eager, **changes
        )
        rank = EngineRank(config, SoloCommunicator(), torch.device("cuda", 0))
        runner = rank._runner(rank._drafter, verify)
        if isinstance(runner, GraphedCycle):
            logits = [c.output.logits_RV for c in runner._captured.values() if c.output.logits_RV is not None]
            assert len({found.data_ptr() for found in logits}) < len(logits), "each graph keeps logits of its own"
        run = serve(rank, SoloCommunicator(), asked)
        assert run is not None
        reports.append(
            {
                name: (result.ids, [told.logprob for delta in result.deltas for told in delta.logprobs or ()])
                for name, result in run.results.items()
            }
        )
    eager_report, graph_report = reports
    for name, (ids, logprobs) in eager_report.items():
        assert graph_report[name][0] == ids
        assert len(logprobs) == len(ids)
        assert graph_report[name][1] == pytest.approx(logprobs, abs=1e-4)
