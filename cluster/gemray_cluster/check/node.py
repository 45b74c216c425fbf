"""What only a node itself can see: run on each node that may hold a rank."""

from __future__ import annotations

import os
from dataclasses import replace

from gemray_cluster.check import interface, model_directory, shared_memory
from gemray_cluster.check.result import CheckResult

NO_ANSWER = "node"
NODE_CHECKS = frozenset({model_directory.NAME, shared_memory.NAME, interface.NAME, NO_ANSWER})
"""Names of the checks that are made on each node."""


def check_this_node(node_ip: str, model: str, drafter: str | None, *, local_ranks: int) -> list[CheckResult]:
    """The checks of one node, made by a process on it.

    Args:
        node_ip: address by which Ray knows the node.
        model: model directory, the same path on every node.
        drafter: the drafter's, if there is one.
        local_ranks: ranks that may run here.
    """
    results = [
        model_directory.check_model_directory(model, node=node_ip),
        shared_memory.check_shared_memory(node_ip, shared_memory.local_size(), local_ranks=local_ranks),
        interface.check_interface(node_ip, os.environ, existing=interface.local_interfaces()),
    ]
    if drafter is not None:
        results.insert(1, model_directory.check_model_directory(drafter, node=node_ip, tokenizer=False))
    return [replace(result, node=node_ip) for result in results]
