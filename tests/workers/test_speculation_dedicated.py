"""A DFlash drafter on a rank of its own: the same ids, and the same drafts as inside the target's ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemray_workers.config import EngineConfig
from gemray_workers.drafters.dedicated.rank import DrafterRank
from gemray_workers.engine.rank import EngineRank
from gemray_workers.errors import InvalidField
from gemray_workers.messages import SpeculationCounters, Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator
from support.engine_runner import Run, engine_config, run_engine, serve
from support.gang import RunOnGang
from support.tiny import tiny_checkpoint
from support.tiny_drafters import tiny_assistant, tiny_dflash

from .test_engine_ids import mixed_requests

CPU = torch.device("cpu")


def settings(tp: int, placement: str) -> EngineConfig:
    target = tiny_checkpoint("31B")
    return engine_config(
        target,
        tensor_parallel_size=tp,
        drafter_path=str(tiny_dflash(target)),
        drafter_placement=placement,
        max_draft_tokens=5,
        prefill_chunk=9,
    )


def serve_dedicated(
    gang: TorchCommunicator, config: EngineConfig, submits: list[Submit]
) -> tuple[dict[str, list[int]], dict[str, SpeculationCounters | None]] | None:
    """On each rank of a gang of TP + 1: what rank 0 gave the requests."""
    torch.set_num_threads(1)
    if gang.rank == config.tensor_parallel_size:
        rank = DrafterRank(config, gang, CPU)
        rank.warm_up()
        rank.engine().run()
        return None
    comm = gang.subgroup(config.tensor_parallel_size, "target")
    target = EngineRank(config, comm, CPU, gang=gang)
    target.warm_up()
    run = serve(target, comm, submits)
    return None if run is None else outcome_of(run)


def outcome_of(run: Run) -> tuple[dict[str, list[int]], dict[str, SpeculationCounters | None]]:
    return run.ids, {request_id: result.last.speculation for request_id, result in run.results.items()}


@pytest.mark.parametrize("tp", [1, 2])
def test_ids_and_acceptance_equal_those_of_a_colocated_drafter(run_on_gang: RunOnGang, tp: int) -> None:
    submits = mixed_requests(seed=30 + tp)
    plain = run_engine(SoloCommunicator(), engine_config(tiny_checkpoint("31B")), submits)
    colocated = run_engine(SoloCommunicator(), settings(1, "colocated"), submits)
    assert plain is not None
    assert colocated is not None
    first, *others = run_on_gang(tp + 1, serve_dedicated, settings(tp, "dedicated"), submits)
    assert others == [None] * tp
    assert first[0] == plain.ids == colocated.ids
    assert first == outcome_of(colocated)
    counters = [counter for counter in first[1].values() if counter is not None]
    assert sum(counter.drafted for counter in counters) > 100


def test_an_mtp_assistant_cannot_leave_the_target() -> None:
    target = tiny_checkpoint("31B")
    config: dict[str, Any] = {"drafter_path": str(tiny_assistant(target)), "drafter_placement": "dedicated"}
    with pytest.raises(InvalidField, match="shares the target's KV cache"):
        EngineRank(engine_config(target, **config), SoloCommunicator(), CPU)


def test_a_placement_without_a_drafter_is_refused() -> None:
    with pytest.raises(InvalidField, match="there is no drafter"):
        engine_config(tiny_checkpoint("31B"), drafter_placement="dedicated")
