"""Room for a gang: one Ray placement group with a bundle per rank."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from gemray_cluster.gang.config import PlacementStrategy
from gemray_cluster.ray_runtime.blocking import in_own_thread
from gemray_workers.errors import CapacityError

logger = logging.getLogger(__name__)

Resources = Mapping[str, float]

_POLL_S = 1.0
"""How often a wait for resources looks whether it was cancelled."""
_RELEASE_DEADLINE_S = 5.0


@dataclass(frozen=True)
class NodeResources:
    """One live node of the cluster."""

    address: str
    total: Resources
    available: Resources


async def reserve(
    num_ranks: int,
    bundle: Resources,
    *,
    strategy: PlacementStrategy,
    deadline_s: float,
    name: str = "",
    waiting: Callable[[str], None] = lambda shortage: None,
) -> PlacementGroup:
    """Reserve `bundle` (e.g. ``{"GPU": 1, "CPU": 1}``) for each rank; nodes that join before the deadline count.

    `waiting` is called once with what is wanted and available when the resources are not there at once.

    Raises CapacityError, saying both, at the deadline.
    """
    until = time.monotonic() + deadline_s
    group = await in_own_thread(_create, num_ranks, bundle, strategy, name)
    try:
        told = False
        while not await in_own_thread(group.wait, min(_POLL_S, max(0.0, until - time.monotonic()))):
            shortage = describe_shortage(num_ranks, bundle, await in_own_thread(list_nodes))
            if time.monotonic() >= until:
                raise CapacityError(f"no room for the gang within {deadline_s:g} s (strategy {strategy}): {shortage}")
            if not told:
                logger.warning("waiting up to %g s for resources: %s", deadline_s, shortage)
                waiting(shortage)
                told = True
    except BaseException:
        await asyncio.shield(_release_if_it_can_be(group))
        raise
    return group


async def release(group: PlacementGroup) -> None:
    """Give the reserved resources back; actors that still use them are killed by Ray."""
    await in_own_thread(remove_placement_group, group)


async def warn_if_apart(group: PlacementGroup, drafter_rank: int) -> None:
    """Say so when a dedicated drafter is on another node than rank 0: each step then waits for the network."""
    nodes = await in_own_thread(_nodes_of_bundles, group)
    if nodes[drafter_rank] != nodes[0]:
        logger.warning(
            "the dedicated drafter (rank %d) is on another node than rank 0: features and drafts cross the network in "
            "each step; with the strategy strict_pack the gang waits for one node instead",
            drafter_rank,
        )


async def _release_if_it_can_be(group: PlacementGroup) -> None:
    try:
        async with asyncio.timeout(_RELEASE_DEADLINE_S):
            await release(group)
    except TimeoutError:
        logger.error("the cluster took no reservation back within %g s", _RELEASE_DEADLINE_S)


def list_nodes() -> list[NodeResources]:
    """The live nodes, ordered by address."""
    available = available_resources_per_node()  # type: ignore[no-untyped-call]
    nodes = [
        NodeResources(node["NodeManagerAddress"], node["Resources"], available.get(node["NodeID"], {}))
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: node.address)


def choose_strategy(num_ranks: int, bundle: Resources, nodes: list[NodeResources], asked: PlacementStrategy) -> str:
    """Ray's name of the strategy: what was asked, or for auto one node if any is large enough, else as few as can be.

    A node that is large enough but busy is waited for: tensor parallelism across hosts is far slower than in one.
    """
    if asked != "auto":
        return asked.upper()
    one_node_holds_all = any(
        all(node.total.get(kind, 0.0) >= num_ranks * amount for kind, amount in bundle.items()) for node in nodes
    )
    return "STRICT_PACK" if one_node_holds_all else "PACK"


def describe_shortage(num_ranks: int, bundle: Resources, nodes: list[NodeResources]) -> str:
    """E.g. ``wanted 2 x {GPU: 1}; available: node 10.0.0.1 {CPU: 8, GPU: 1}`` plus what is in use there."""
    kinds = sorted({"CPU", "GPU", *bundle})
    wanted = f"wanted {num_ranks} x {_in_words(bundle, sorted(bundle, reverse=True))}"
    if not nodes:
        return f"{wanted}; available: no node"
    each = []
    for node in nodes:
        text = f"node {node.address} {_in_words(node.available, kinds)}"
        if any(node.available.get(kind, 0.0) < node.total.get(kind, 0.0) for kind in kinds):
            text += f" of {_in_words(node.total, kinds)}"
        each.append(text)
    return f"{wanted}; available: {', '.join(each)}"


def _create(num_ranks: int, bundle: Resources, strategy: PlacementStrategy, name: str) -> PlacementGroup:
    chosen = choose_strategy(num_ranks, bundle, list_nodes(), strategy)
    group: PlacementGroup = placement_group([dict(bundle) for _ in range(num_ranks)], strategy=chosen, name=name)
    return group


def _nodes_of_bundles(group: PlacementGroup) -> dict[int, str]:
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return nodes


def _in_words(resources: Resources, kinds: list[str]) -> str:
    return "{" + ", ".join(f"{kind}: {resources.get(kind, 0.0):g}" for kind in kinds) + "}"
