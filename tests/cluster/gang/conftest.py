"""Routers over gangs without processes, and one Ray for all gang tests of a session: CPUs only, no dashboard."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gemray_cluster.gang.router import Router
from gemray_cluster.gang.scaling import ReplicaLimits
from support.cluster.ray_turns import rays_turn
from support.cluster.stepped_gangs import Routers

TESTS = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
async def routers() -> AsyncIterator[Routers]:
    """Make routers that look often at what there is to do; all are stopped at the end."""
    made: list[Router] = []

    def make(limits: ReplicaLimits, **options: Any) -> Router:
        made.append(Router(limits, **{"max_rebuilds": 3, "tick_s": 0.01, "retry_s": 0.01, **options}))
        return made[-1]

    yield make
    for router in made:
        await router.stop()


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Ray on this machine with 4 CPUs; its workers can import `support`."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])))
        import ray

        from gemray_cluster.ray_runtime.unused_processes import without_unused_processes

        start = partial(
            ray.init,
            address="local",
            namespace="gemray-tests",
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        with rays_turn(), without_unused_processes():
            try:
                start()
            except Exception:  # seen once: the raylet had ended as it began, so that the node did not come up
                ray.shutdown()
                start()
        yield
        ray.shutdown()
