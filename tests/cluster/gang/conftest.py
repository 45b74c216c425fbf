"""One Ray for all gang tests of a session: CPUs only, no dashboard, no authentication."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Ray on this machine with 4 CPUs; its workers can import `support`."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])))
        import ray

        ray.init(
            address="local",
            namespace="gemray-tests",
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        yield
        ray.shutdown()
