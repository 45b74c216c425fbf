"""What only a node itself can see: run on each node that may hold a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from gemray_cluster.check import interface, model_directory, shared_memory
from gemray_cluster.check.model_directory import Checkpoints, check_model_directory
from gemray_cluster.check.result import CheckResult
from gemray_workers.checkpoint.hub import on_this_node

NO_ANSWER = "node"
NODE_CHECKS = frozenset({model_directory.NAME, shared_memory.NAME, interface.NAME, NO_ANSWER})
"""Names of the checks that are made on each node."""


def check_this_node(
    node_ip: str, checkpoints: Checkpoints, *, local_ranks: int, gang_size: int, forwarded: Mapping[str, str]
) -> list[CheckResult]:
    """The checks of one node, made by a process on it.

    Args:
        node_ip: address by which Ray knows the node.
        checkpoints: what it needs to hold.
        local_ranks: ranks that may run here.
        gang_size: ranks that have shared memory between them.
        forwarded: variables that ranks are given in place of this node's own.
    """
    results = [
        check_model_directory(on_this_node(checkpoints.model), node=node_ip, weights=checkpoints.weights),
        shared_memory.check_shared_memory(
            node_ip, shared_memory.local_size(), local_ranks=local_ranks, gang_size=gang_size
        ),
        interface.check_interface(node_ip, {**os.environ, **forwarded}, existing=interface.local_interfaces()),
    ]
    results[1:1] = [
        check_model_directory(on_this_node(drafter), node=node_ip, weights=checkpoints.weights, tokenizer=False)
        for drafter in checkpoints.drafters
    ]
    return [replace(result, node=node_ip) for result in results]
