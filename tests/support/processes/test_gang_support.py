"""The gang helper itself: results by rank, failures told in full, no process left behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from gemray_workers.parallel.communicator import Communicator
from support.processes.gang import GangFailure, GangPools, RunOnGang
from support.waiting import HANG_S


@dataclass(frozen=True)
class Scaled:
    """A class of this test module, to see that ranks can unpickle it."""

    factor: float


def scaled_rank(comm: Communicator, scaled: Scaled) -> tuple[int, int, Scaled]:
    assert torch.get_num_threads() == 1
    return comm.rank, comm.size, Scaled(scaled.factor * comm.rank)


def process_id(comm: Communicator) -> int:
    return os.getpid()


def fail_on_rank_1(comm: Communicator) -> None:
    if comm.rank == 1:
        raise LookupError("a planted failure")
    comm.barrier()


def hang_on_rank_1(comm: Communicator) -> None:
    if comm.rank == 1:
        time.sleep(600)


def exit_on_rank_1(comm: Communicator) -> None:
    if comm.rank == 1:
        os._exit(7)


def abort_on_rank_1(comm: Communicator) -> None:
    if comm.rank == 1:
        leave_a_flight_record()
        os.abort()
    comm.barrier()


def leave_a_flight_record() -> None:
    """As NCCL's watchdog does: torch's own record of this rank's collectives, one of them without an end."""
    from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

    recorded = pickle.loads(_dump_fr_trace())
    recorded["entries"][-1] |= {"state": "scheduled", "retired": False}
    Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}1").write_bytes(pickle.dumps(recorded))


def unpicklable(comm: Communicator) -> object:
    return lambda: None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_rank_order(run_on_gang: RunOnGang, size: int) -> None:
    results = run_on_gang(size, scaled_rank, Scaled(0.5))
    assert results == [(rank, size, Scaled(0.5 * rank)) for rank in range(size)]


def test_processes_are_kept_between_calls(run_on_gang: RunOnGang) -> None:
    first = run_on_gang(2, process_id)
    assert run_on_gang(2, process_id) == first
    assert os.getpid() not in first


@pytest.fixture
def own_pools() -> Iterator[GangPools]:
    """Pools that a failure may break without slowing the rest of the session."""
    pools = GangPools()
    yield pools
    pools.close()


def is_alive(process_id: int) -> bool:
    """Running: neither gone nor waiting for someone to read its exit code."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_failures_are_told_and_leave_no_process(own_pools: GangPools) -> None:
    before = own_pools.run(2, process_id)
    with pytest.raises(GangFailure, match=r"(?s)fail_on_rank_1.*rank 1.*LookupError: a planted failure"):
        own_pools.run(2, fail_on_rank_1)
    assert not any(map(is_alive, before))

    own_pools.run(2, process_id)  # starts the ranks and imports this module there, which the timeout does not wait for
    with pytest.raises(GangFailure, match=r"(?s)rank 1: gave no answer in 5\.0 s.*in hang_on_rank_1") as hung:
        own_pools.run(2, hang_on_rank_1, timeout_s=5.0)
    assert "rank 0" not in str(hung.value)

    with pytest.raises(GangFailure, match="rank 1: died with exit code 7"):
        own_pools.run(2, exit_on_rank_1)

    with pytest.raises(GangFailure, match=r"(?s)rank 1: died with exit code -6.*in abort_on_rank_1") as aborted:
        own_pools.run(2, abort_on_rank_1)
    assert "flight recorder: gloo:barrier number 1 of [] is scheduled, 0 more behind it" in str(aborted.value)

    after = own_pools.run(2, process_id)
    assert set(after).isdisjoint(before)
    own_pools.close()
    assert not any(map(is_alive, after))


KILLED_SESSION = """
import sys
sys.path[:0] = sys.argv[1:]
from support.processes.gang import GangPools
from ranks_module import wait_for_ever
pools = GangPools()
if __name__ == "__main__":
    pools.run(2, wait_for_ever, "nothing yet")
    print(*pools.process_ids(2), flush=True)
    pools.run(2, wait_for_ever, "now")
"""
RANKS_MODULE = """
def wait_for_ever(comm, when):
    if when == "now" and comm.rank == 0:
        import time
        time.sleep(600)
    comm.barrier()
"""


def test_ranks_die_with_a_session_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "ranks_module.py").write_text(RANKS_MODULE)
    (tmp_path / "session.py").write_text(KILLED_SESSION)
    command = [sys.executable, str(tmp_path / "session.py"), str(tmp_path), str(Path(__file__).parents[2])]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as session:
        assert session.stdout is not None
        ranks = [int(word) for word in session.stdout.readline().split()]
        assert len(ranks) == 2
        assert all(map(is_alive, ranks))
        time.sleep(0.3)  # into the second call
        session.kill()
    deadline = time.monotonic() + HANG_S
    while any(map(is_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, ranks))


def test_an_unpicklable_result_names_itself(own_pools: GangPools) -> None:
    with pytest.raises(GangFailure, match="unpicklable"):
        own_pools.run(2, unpicklable)


def test_a_single_rank_fails_alike(run_on_gang: RunOnGang) -> None:
    with pytest.raises(GangFailure, match="LookupError"):
        run_on_gang(1, raise_lookup_error)


def raise_lookup_error(comm: Communicator) -> None:
    raise LookupError(comm.rank)
