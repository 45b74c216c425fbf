"""Mixed traffic on GPUs for a stated time (`--traffic-seconds`): no id changes, nothing is lost, memory stays flat."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from gemray_workers.messages import Submit
from support.checkpoints.tiny import VOCAB_SIZE, Shape
from support.engine.gpu import needs_gpus
from support.engine.traffic import catalogue, plain_answers, traffic
from support.engine.traffic_configs import CONFIGS, MAX_MODEL_LEN, traffic_config, traffic_faults
from support.processes.gang import RunOnGang

START_S = 240.0
"""Captures of all graphs, and the plain answers."""


@cache
def known(shape: Shape) -> tuple[list[Submit], dict[str, list[int]]]:
    """Requests and their ids on one card, each alone, without a drafter, kernel by kernel."""
    submits = catalogue(VOCAB_SIZE, MAX_MODEL_LEN, count=40, most_drafts=4, most_tokens=48, seed=5)
    name = next(name for name, served in CONFIGS.items() if served.shape == shape)
    return submits, plain_answers(traffic_config(name, "cuda"), submits)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.cards(served.num_ranks)) for name, served in CONFIGS.items()]
)
def test_nothing_changes_and_nothing_is_lost(
    run_on_gang: RunOnGang, name: str, traffic_seconds: float, record_property: Callable[[str, object], None]
) -> None:
    """The time is shared by the configurations."""
    config = traffic_config(name, "cuda")
    needs_gpus(config.gang_size)
    seconds = traffic_seconds / len(CONFIGS)
    reports = run_on_gang(
        config.gang_size, traffic, config, *known(CONFIGS[name].shape), seconds, timeout_s=seconds + START_S
    )
    record_property("traffic", str(reports[0]))
    print(f"{name}: {reports[0]}")
    faults = traffic_faults(reports)
    assert not faults, "\n".join(faults)
    assert reports[0].preemptions
    assert reports[0].cancelled
