"""Fixtures of the whole suite."""

from __future__ import annotations

import os

# Before torch and ray are imported: the test machine has few cores, and its clusters are local.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# As `gemray` does: a call that finds no Ray must fail, not start one. A Ray that a test's thread starts ends with the
# thread, and a minute later Ray's library ends the whole process that has lost it.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# Nobody steps through kernels that tests compile, and line numbers take an eighth of the time.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")

from collections.abc import Iterator

import pytest
import torch

from support import hypothesis_settings
from support.cluster.ray_patience import RAY_PATIENCE
from support.processes.collecting import pytest_collection  # noqa: F401
from support.processes.failure_reports import pytest_runtest_makereport  # noqa: F401
from support.processes.file_order import longest_files_first
from support.processes.gang import GangPools, RunOnGang
from support.processes.session_end import pytest_configure, pytest_unconfigure  # noqa: F401

for _name, _value in RAY_PATIENCE.items():
    os.environ.setdefault(_name, _value)
# As `gemray` does: Ray's processes are forked beside threads of gRPC, whose handlers of a fork may end one before it
# has begun. Nothing here forks and then uses gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
hypothesis_settings.load_profile()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Ranks of a gang compute on one thread each; so does the session they are compared with."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gang_pools() -> Iterator[GangPools]:
    """Pools of gloo ranks, one a size, ended with the session."""
    pools = GangPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def run_on_gang(gang_pools: GangPools) -> RunOnGang:
    """``run_on_gang(size, fn, *args, timeout_s=HANG_S)``: every rank's ``fn(comm, *args)``, in rank order.

    `fn` must be a top-level function; size 1 runs in this process with SoloCommunicator.
    """
    return gang_pools.run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of tests/gpu, here because pytest asks before it has looked for other conftest files."""
    parser.addoption(
        "--traffic-seconds", type=float, default=120.0, metavar="SECONDS",
        help="how long the GPU tests' mixed traffic lasts, all its configurations together",
    )  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a CUDA device. Workers of pytest-xdist take long files first."""
    if hasattr(config, "workerinput"):
        longest_files_first(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
