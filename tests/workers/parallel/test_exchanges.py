"""How far a rank has come with its collectives, as another thread of it sees it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from gemray_workers.errors import CommunicationError
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.exchanges import Exchanges
from gemray_workers.parallel.torch_communicator import TorchCommunicator, silenced
from support.processes.gang import RunOnGang
from support.waiting import HANG_S


def as_seen_by_the_first(comm: Communicator) -> Exchanges | None:
    """Rank 0's collective in which it waits for the last rank, as seen by a thread meanwhile; numbers begin here."""
    assert isinstance(comm, TorchCommunicator)
    before = comm.exchanges()[0].begun
    comm.all_gather(torch.tensor([before]))
    with silenced(comm):
        comm.all_reduce(torch.ones(2))
    if comm.rank == 0:
        comm.send(torch.ones(1), 1)
    elif comm.rank == 1:
        comm.receive(torch.empty(1), 0)
    seen: list[Exchanges] = []
    if comm.rank == 0:
        watching = threading.Thread(target=lambda: seen.append(inside(comm)))
        watching.start()
    if comm.rank == comm.size - 1:
        time.sleep(0.5)
    comm.barrier()
    if comm.rank != 0:
        return None
    watching.join(HANG_S)
    (found,) = seen
    return Exchanges(group=found.group, begun=found.begun - before, inside=found.inside, seconds=found.seconds)


def inside(comm: TorchCommunicator) -> Exchanges:
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        (found,) = comm.exchanges()
        if found.inside is not None and found.seconds > 0.1:
            return found
    raise TimeoutError("it never waited")


def test_the_collective_that_a_rank_waits_in_is_seen_with_its_number(run_on_gang: RunOnGang) -> None:
    """Neither what passes between two ranks nor what is silenced counts, as other ranks do more or less of it."""
    found = run_on_gang(2, as_seen_by_the_first)[0]
    assert (found.group, found.begun, found.inside) == ("gang", 2, "barrier")


def numbers_of_groups(comm: Communicator) -> list[tuple[str, int]]:
    assert isinstance(comm, TorchCommunicator)
    gang, *others = comm.exchanges()  # of tests that had this gang before
    if comm.rank < 2:
        pair = comm.subgroup(2, "pair")
        pair.all_reduce(torch.ones(1))
        pair.barrier()
    comm.barrier()
    found, *pairs = comm.exchanges()
    return [(found.group, found.begun - gang.begun), *((e.group, e.begun) for e in pairs[len(others) :])]


def test_subgroups_count_apart(run_on_gang: RunOnGang) -> None:
    first, second, third = run_on_gang(3, numbers_of_groups)
    assert first == second == [("gang", 1), ("pair", 2)]
    assert third == [("gang", 1)]


def fail_in_one(comm: Communicator) -> Exchanges:
    """What is left behind a collective that raised."""
    assert isinstance(comm, TorchCommunicator)
    comm.barrier()
    before = comm.exchanges()[0].begun
    with pytest.raises(CommunicationError), comm._collective("barrier"):
        raise RuntimeError("the peer is gone")
    found = comm.exchanges()[0]
    return Exchanges(group=found.group, begun=found.begun - before, inside=found.inside, seconds=found.seconds)


def test_none_is_inside_behind_a_collective_that_failed(run_on_gang: RunOnGang) -> None:
    left = Exchanges(group="gang", begun=1, inside=None, seconds=0.0)
    assert run_on_gang(2, fail_in_one) == [left, left]
