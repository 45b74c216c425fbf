"""The published shapes that benchmarks run on: each draws a blueprint, and its parameters add up (spec 0.1 to 0.3)."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch

from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.config import EngineConfig
from gemray_workers.drafters.dflash.config import DFlashConfig
from gemray_workers.drafters.dflash.model import DFlashModel
from gemray_workers.drafters.mtp.assistant import AssistantModel
from gemray_workers.drafters.mtp.config import AssistantConfig
from gemray_workers.errors import InvalidField
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.blueprint import Blueprint

CONFIGS = Path(__file__).resolve().parents[3] / "benchmarks" / "configs"
META = torch.device("meta")

# Billions by the spec's arithmetic, and of them in the per-layer table.
TARGETS = {
    "E2B-it": (4.63, 2.35),
    "E4B-it": (7.46, 2.82),
    "12B-it": (11.91, 0.0),
    "26B-A4B-it": (25.23, 0.0),
    "31B-it": (30.70, 0.0),
}
DRAFTERS = {
    "E2B-it-assistant": 0.078,
    "E4B-it-assistant": 0.0788,
    "12B-it-assistant": 0.423,
    "26B-A4B-it-assistant": 0.42,
    "31B-it-assistant": 0.47,
    "26B-A4B-it-DFlash": 0.43,
    "31B-it-DFlash": 1.54,
}


def billions(targets: list[WeightTarget], part: str = "") -> float:
    """Parameters, without the centroid head's ordering of ids, which is no parameter."""
    sizes = [prod(t.shape) for t in targets if part in t.name and not t.name.endswith("token_ordering")]
    return sum(sizes) / 1e9


def target_of(drafter: str) -> str:
    return drafter.removesuffix("-assistant").removesuffix("-DFlash")


@pytest.mark.parametrize("name", TARGETS)
def test_parameters_of_a_target(name: str) -> None:
    config = ModelConfig.from_directory(CONFIGS / name)
    model = TargetModel(config, SoloCommunicator(), dtype=torch.bfloat16, device=META)
    total, table = TARGETS[name]
    assert billions(model.weight_targets()) == pytest.approx(total, abs=0.005)
    assert billions(model.weight_targets(), "embed_tokens_per_layer") == pytest.approx(table, abs=0.005)


@pytest.mark.parametrize("name", DRAFTERS)
def test_parameters_of_a_drafter(name: str) -> None:
    target = ModelConfig.from_directory(CONFIGS / target_of(name))
    comm = SoloCommunicator()
    model: AssistantModel | DFlashModel
    if name.endswith("DFlash"):
        model = DFlashModel(
            DFlashConfig.from_directory(CONFIGS / name, target), comm, dtype=torch.bfloat16, device=META
        )
    else:
        shard = TargetModel(target, comm, dtype=torch.bfloat16, device=META).shard
        config = AssistantConfig.from_directory(CONFIGS / name, target)
        model = AssistantModel(config, shard, comm, dtype=torch.bfloat16, device=META)
    assert billions(model.weight_targets()) == pytest.approx(DRAFTERS[name], rel=0.03)


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_blueprints(drafter: str | None, tp: int) -> None:
    for name in TARGETS if drafter is None else [target_of(drafter)]:
        settings = EngineConfig(
            model_path=str(CONFIGS / name),
            drafter_path=None if drafter is None else str(CONFIGS / drafter),
            tensor_parallel_size=tp,
            dtype="bfloat16",
            device="cpu",
            kv_memory_bytes=8 << 30,
            max_model_len=8192,
            max_num_seqs=8,
            random_weights=True,
        )
        if tp > _most_ranks(name, drafter):
            with pytest.raises(InvalidField, match="tensor_parallel_size"):
                Blueprint.of(settings)
            continue
        blueprint = Blueprint.of(settings)
        assert blueprint.pools.max_model_len == 8192
        assert blueprint.drafter.traits.num_draft_tokens == (
            0 if drafter is None else 15 if drafter.endswith("DFlash") else 4
        )


def _most_ranks(name: str, drafter: str | None) -> int:
    """The assistants of the small models have four heads."""
    return 4 if drafter is not None and name.startswith("E") else 8
