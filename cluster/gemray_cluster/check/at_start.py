"""The checks that `gemray serve` makes of the cluster as it starts."""

from __future__ import annotations

import logging

from gemray_cluster.check import resources
from gemray_cluster.check.cluster import check_cluster
from gemray_cluster.check.model_directory import Checkpoints
from gemray_cluster.check.node import NODE_CHECKS
from gemray_cluster.check.result import Status
from gemray_cluster.ray_runtime.blocking import in_own_thread
from gemray_cluster.ray_runtime.placement import Resources, list_nodes
from gemray_workers.errors import CapacityError

logger = logging.getLogger(__name__)


async def look_before_start(
    *, num_ranks: int, bundle: Resources, checkpoints: Checkpoints, num_gangs: int = 1, may_grow: bool = True
) -> None:
    """Log each finding that is not in order, in a sentence.

    Free resources are not checked of a cluster, which `may_grow`: placement waits for nodes that join later, and says
    what it waits for. One unfit node among others is no error: which nodes get ranks is not decided yet. Raises
    CapacityError when no node is fit, or when what cannot grow never holds the gangs.
    """
    if not may_grow:
        nodes = await in_own_thread(list_nodes)
        resources.require_room_here(nodes, num_ranks=num_ranks, bundle=bundle, num_gangs=num_gangs)
    results = await in_own_thread(
        check_cluster, num_ranks=num_ranks, bundle=bundle, checkpoints=checkpoints, num_gangs=num_gangs
    )
    for result in results:
        if result.name == resources.NAME:
            continue
        logger.log(logging.INFO if result.status is Status.OK else logging.WARNING, "%s", result)
    asked = {result.node for result in results if result.name in NODE_CHECKS}
    unfit = [result for result in results if result.name in NODE_CHECKS and result.status is Status.FAIL]
    if asked and {result.node for result in unfit} == asked:
        raise CapacityError("no node is fit for a rank: " + " ".join(result.sentence for result in unfit))
