"""Room for a gang: what is said when there is none, and how it is chosen."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import ray

from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.ray_runtime.actor import gpu_ordinal
from gemray_cluster.ray_runtime.launcher import RayLauncher
from gemray_cluster.ray_runtime.placement import (
    NodeResources,
    _nodes_of_bundles,
    choose_strategy,
    describe_shortage,
    list_nodes,
    release,
    reserve,
)
from gemray_cluster.ray_runtime.session import RaySession
from gemray_workers.errors import CapacityError
from gemray_workers.rank.worker import RankWorker
from support.engine.engine_runner import engine_config
from support.waiting import HANG_S, eventually


def node(address: str, total: dict[str, float], available: dict[str, float] | None = None) -> NodeResources:
    return NodeResources(address, total, total if available is None else available)


SMALL = node("10.0.0.1", {"CPU": 8, "GPU": 1})
LARGE_BUSY = node("10.0.0.2", {"CPU": 16, "GPU": 2}, {"CPU": 15, "GPU": 1})


def test_the_shortage_says_wanted_and_available_per_node() -> None:
    assert (
        describe_shortage(2, {"GPU": 1, "CPU": 1}, [SMALL, LARGE_BUSY])
        == "wanted 2 x {GPU: 1, CPU: 1}; available: node 10.0.0.1 {CPU: 8, GPU: 1}, "
        "node 10.0.0.2 {CPU: 15, GPU: 1} of {CPU: 16, GPU: 2}"
    )
    assert describe_shortage(1, {"CPU": 1}, []) == "wanted 1 x {CPU: 1}; available: no node"


@pytest.mark.parametrize(
    ("nodes", "asked", "chosen"),
    [
        ([SMALL, LARGE_BUSY], "auto", "STRICT_PACK"),  # waits for the busy node: one host beats two
        ([SMALL, SMALL], "auto", "PACK"),
        ([], "auto", "PACK"),
        ([SMALL, LARGE_BUSY], "spread", "SPREAD"),
        ([SMALL, SMALL], "strict_pack", "STRICT_PACK"),
    ],
)
def test_strategy(nodes: list[NodeResources], asked: str, chosen: str) -> None:
    assert choose_strategy(2, {"GPU": 1, "CPU": 1}, nodes, asked) == chosen  # type: ignore[arg-type]


def all_free() -> bool:
    return all(node.available == node.total for node in list_nodes())


async def test_missing_gpus_are_named_at_the_deadline(local_ray: None) -> None:
    told: list[str] = []
    await eventually(all_free)  # what gangs before held comes back in time
    before = list_nodes()
    began = time.monotonic()
    with pytest.raises(CapacityError) as caught:
        await reserve(2, {"GPU": 1, "CPU": 1}, strategy="auto", deadline_s=1.5, waiting=told.append)
    assert time.monotonic() - began > 1.4
    address = ray.nodes()[0]["NodeManagerAddress"]
    shortage = f"wanted 2 x {{GPU: 1, CPU: 1}}; available: node {address} {{CPU: 4, GPU: 0}}"
    assert str(caught.value) == f"no room for the gang within 1.5 s (strategy auto): {shortage}"
    assert told == [shortage]
    await eventually(lambda: list_nodes() == before)  # nothing stays reserved


async def test_room_is_held_until_released_and_waited_for(local_ray: None) -> None:
    await eventually(all_free)
    first = await reserve(3, {"CPU": 1}, strategy="auto", deadline_s=HANG_S)
    with pytest.raises(CapacityError, match=r"wanted 2 x \{CPU: 1\}; .* \{CPU: 1, GPU: 0\} of \{CPU: 4, GPU: 0\}"):
        await reserve(2, {"CPU": 1}, strategy="auto", deadline_s=3.0)

    async def free_it(shortage: str) -> None:
        await release(first)

    freeing: list[asyncio.Task[None]] = []
    second = await reserve(
        2,
        {"CPU": 1},
        strategy="strict_pack",
        deadline_s=HANG_S,
        waiting=lambda shortage: freeing.append(asyncio.create_task(free_it(shortage))),
    )
    assert len(freeing) == 1, "it had to wait"
    await release(second)


@pytest.mark.parametrize(
    ("placement", "nodes", "is_warned"),
    [
        ("dedicated", {0: "a", 1: "a", 2: "b"}, True),
        ("dedicated", {0: "a", 1: "b", 2: "a"}, False),
        ("colocated", {0: "a", 1: "a", 2: "b"}, False),  # a rank of the target
    ],
)
async def test_a_dedicated_drafter_on_another_node_is_told(
    local_ray: None,
    placement: Any,
    nodes: dict[int, str],
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("gemray_cluster.ray_runtime.placement._nodes_of_bundles", lambda group: nodes)
    monkeypatch.setattr(RayLauncher, "_start_actor", lambda *_: None)
    engine = engine_config("target", drafter_path="drafter", drafter_placement=placement)
    launcher = RayLauncher(RaySession(ClusterConfig(), owned=False), ClusterConfig(), engine, RankWorker)
    await launcher.launch(3, lambda progress: None)
    await launcher.release()
    assert ("the dedicated drafter (rank 2) is on another node than rank 0" in caplog.text) == is_warned


async def test_the_nodes_of_a_gang_are_rays(local_ray: None) -> None:
    group = await reserve(2, {"CPU": 1}, strategy="auto", deadline_s=HANG_S)
    assert _nodes_of_bundles(group) == dict.fromkeys(range(2), ray.nodes()[0]["NodeID"])
    await release(group)


@pytest.mark.parametrize(
    ("ids", "environment", "ordinal"),
    [
        ([1], {}, 1),  # every card is visible: the id is the ordinal
        (["3"], {"CUDA_VISIBLE_DEVICES": "2,3"}, 1),  # the node shows only some of them
        ([1], {"CUDA_VISIBLE_DEVICES": "1"}, 0),  # Ray has narrowed it down to the one
        (["GPU-ab"], {"CUDA_VISIBLE_DEVICES": "GPU-cd, GPU-ab"}, 1),
    ],
)
def test_gpu_ordinal(ids: list[int | str], environment: dict[str, str], ordinal: int) -> None:
    assert gpu_ordinal(ids, environment) == ordinal


@pytest.mark.parametrize(
    ("ids", "environment"), [([], {}), ([0, 1], {}), ([4], {"CUDA_VISIBLE_DEVICES": "0,1"})]
)  # fmt: skip
def test_gpu_ordinal_refuses(ids: list[int | str], environment: dict[str, str]) -> None:
    with pytest.raises(CapacityError):
        gpu_ordinal(ids, environment)
