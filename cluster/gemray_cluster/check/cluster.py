"""The checks that need Ray: is the cluster there, is there room, is every node fit."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gemray_cluster.check.model_directory import Checkpoints
from gemray_cluster.check.node import NO_ANSWER, check_this_node
from gemray_cluster.check.resources import check_room, ranks_that_fit
from gemray_cluster.check.result import CheckResult, fail, ok
from gemray_cluster.ray_runtime.forwarded import forwarded_variables
from gemray_cluster.ray_runtime.placement import Resources, list_nodes

logger = logging.getLogger(__name__)

NODE_DEADLINE_S = 60.0
"""How long the nodes may take to answer: on a new one Ray starts a worker process first."""


def check_cluster(
    *, num_ranks: int, bundle: Resources, checkpoints: Checkpoints, num_gangs: int = 1, may_grow: bool = True
) -> list[CheckResult]:
    """All checks of the cluster that this process is connected to: room for the gangs, then each node that has slots.

    Nodes may join a cluster, which `may_grow`, but not a Ray that was started here. A node without a slot (the head,
    often) needs no model and no shared memory.
    """
    nodes = list_nodes()
    return [
        ok("ray", f"{len(nodes)} live node(s): {', '.join(node.address for node in nodes)}."),
        check_room(nodes, num_ranks=num_ranks, bundle=bundle, num_gangs=num_gangs, may_grow=may_grow),
        *_check_nodes(num_gangs * num_ranks, bundle, checkpoints, gang_size=num_ranks),
    ]


def _check_nodes(num_ranks: int, bundle: Resources, checkpoints: Checkpoints, *, gang_size: int) -> list[CheckResult]:
    """Ask the nodes, all at once, to look at themselves; one that does not answer in time has failed."""
    look: Any = ray.remote(num_cpus=0, max_retries=0)(check_this_node)  # type: ignore[arg-type]
    answers = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        local_ranks = min(num_ranks, ranks_that_fit(node["Resources"], bundle))
        if node["Alive"] and local_ranks:
            there = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
            address = node["NodeManagerAddress"]
            answer = look.options(scheduling_strategy=there).remote(
                address,
                checkpoints,
                local_ranks=local_ranks,
                gang_size=gang_size,
                forwarded=forwarded_variables(os.environ),
            )
            answers.append((address, answer))
    if answers:
        ray.wait([answer for _, answer in answers], num_returns=len(answers), timeout=NODE_DEADLINE_S)
    results: list[CheckResult] = []
    for address, answer in answers:
        try:
            results += ray.get(answer, timeout=0)
        except Exception as error:  # Ray's timeouts, task errors and dead nodes have no common base
            logger.debug("node %s", address, exc_info=True)
            lines = str(error).strip().splitlines() or [repr(error)]
            silent = fail(NO_ANSWER, f"{address} could not be asked within {NODE_DEADLINE_S:g} s: {lines[-1]}")
            results.append(replace(silent, node=address))
    return results
