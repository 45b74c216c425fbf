"""Whatever step comes while a server serves, its programs are those of the start: on a target's rank, with a drafter
in it or on a card of its own, and on the drafter's."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton", reason="triton is to be had on Linux alone")

from gemray_workers.config import EngineConfig
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator
from gemray_workers.rank.compile_ahead import Rehearsal, plans_ahead
from gemray_workers.rank.drafter_rank import DrafterRank
from gemray_workers.rank.graph_buckets import graph_buckets
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_dflash
from support.engine.engine_runner import engine_config
from support.engine.random_plans import uncaptured_plans
from support.engine.traffic_configs import CONFIGS, traffic_config
from support.kernels.pretended_card import pretended_card

CPU = torch.device("cpu")
PLANS = 40


class Refusing:
    """A group that nothing may be sent over."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a group")


def gang(rank: int, size: int) -> TorchCommunicator:
    group = cast(Any, Refusing())
    return TorchCommunicator(rank, size, cast(Any, None), group, group, CPU, timedelta(seconds=1))


def rehearsal_of(config: EngineConfig, rank: int = 0) -> Rehearsal:
    """A rank's; the last one is a dedicated drafter's."""
    tp = config.tensor_parallel_size
    if rank == tp:
        return DrafterRank(config, gang(rank, tp + 1), CPU).rehearsal()
    target: Communicator = SoloCommunicator() if tp == 1 else gang(rank, tp)
    everyone = gang(rank, tp + 1) if config.drafter_placement == "dedicated" else None
    return EngineRank(config, target, CPU, gang=everyone).rehearsal()


def card_config(name: str) -> EngineConfig:
    """That of mixed traffic on cards, with the card pretended."""
    return replace(traffic_config(name, "cuda"), device="cpu")


@pytest.fixture(autouse=True)
def _all_are_rehearsed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        yield
    assert "could not be rehearsed" not in caplog.text


def programs_of(rehearsal: Rehearsal, plans: Any) -> set[tuple[str, Any]]:
    return {(program.name, program.arguments[0]) for program in rehearsal.programs(plans)}


def missing(rehearsal: Rehearsal) -> set[tuple[str, Any]]:
    """Programs of random plans that no graph holds, of which a start knows nothing."""
    blueprint = rehearsal.blueprint
    captured = graph_buckets(blueprint) if blueprint.why_eager() is None else []
    most = max((member.num_draft_tokens for member in blueprint.drafter.members), default=0)
    plans = list(islice(uncaptured_plans(random.Random(0), blueprint.scheduler, most, captured), PLANS))
    start = programs_of(rehearsal, [plan for some in plans_ahead(blueprint) for plan in some])
    assert len(start) > 10
    return programs_of(rehearsal, plans) - start


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_mixed_traffic_compiles_nothing(name: str) -> None:
    with pretended_card():
        assert missing(rehearsal_of(card_config(name))) == set()


@pytest.mark.slow
def test_a_drafter_on_a_card_of_its_own_compiles_nothing() -> None:
    with pretended_card():
        assert missing(rehearsal_of(card_config("dedicated"), rank=1)) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "numerics"), [("31B", "exact"), ("26B-A4B", "fast")])
def test_long_prompts_compile_nothing(shape: Any, numerics: str) -> None:
    target = tiny_checkpoint(shape)
    config = engine_config(
        target,
        drafter_path=str(tiny_dflash(target)),
        dtype="bfloat16",
        numerics=numerics,
        max_num_seqs=12,
        max_model_len=1024,
        max_step_tokens=512,
        prefill_chunk=200,
        page_size=16,
        poison_freed_pages=False,
    )
    with pretended_card():
        assert missing(rehearsal_of(config)) == set()
