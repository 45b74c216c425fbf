"""Ranks join a gang: its deadline, who is refused, and what a collective says when a peer is silent or gone."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from gemray_workers.errors import CommunicationError, InvalidField
from gemray_workers.parallel.torch_communicator import TorchCommunicator, join_gang
from support.waiting import HANG_S


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_rank_0_names_the_ranks_that_never_came() -> None:
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    waited = r"within \d+\.\d s of 1: rank 1, 2 did not arrive"
    with pytest.raises(CommunicationError, match=f"rank 0 of 3 could not join the gang at {rendezvous} {waited}"):
        join_gang(0, 3, rendezvous, device="cpu", timeout_s=1.0)


def test_other_ranks_name_an_address_where_nobody_listens() -> None:
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(CommunicationError, match=rf"rank 1 of 2 could not join the gang at {rendezvous} within"):
        join_gang(1, 2, rendezvous, device="cpu", timeout_s=1.0)


def test_an_address_in_use_is_an_error_at_once() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        rendezvous = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(CommunicationError, match=rf"rank 0 of 2 .* {rendezvous}"):
            join_gang(0, 2, rendezvous, device="cpu", timeout_s=2 * HANG_S)  # pytest's own timeout comes before


@pytest.mark.parametrize(
    "rendezvous", ["", "127.0.0.1:80", "tcp://127.0.0.1", "tcp://:80", "tcp://host:99999", "tcp://[::1:80", "udp://h:1"]
)
def test_a_malformed_rendezvous_names_itself(rendezvous: str) -> None:
    with pytest.raises(InvalidField, match="rendezvous"):
        join_gang(0, 1, rendezvous, device="cpu", timeout_s=1.0)


def test_a_rank_outside_the_gang_is_refused() -> None:
    with pytest.raises(InvalidField, match="rank = 2 is not allowed: 0 <= rank < size = 2"):
        join_gang(2, 2, "tcp://127.0.0.1:1", device="cpu", timeout_s=1.0)


def together(ranks: list[tuple[int, int]], collective_timeout_s: float | None = None) -> list[Any]:
    """Join as several (rank, claimed size) at once, from threads of this process; a communicator or error each."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    outcomes: list[Any] = [None] * len(ranks)

    def join(index: int, rank: int, claimed: int) -> None:
        try:
            outcomes[index] = join_gang(
                rank, claimed, rendezvous, device="cpu", timeout_s=HANG_S, collective_timeout_s=collective_timeout_s
            )
        except CommunicationError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=join, args=(i, rank, claimed)) for i, (rank, claimed) in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_ranks_that_disagree_about_the_size_say_so() -> None:
    outcomes = together([(0, 2), (1, 3), (2, 3)])
    assert any("the ranks disagree about the gang's size" in str(outcome) for outcome in outcomes)
    assert all(isinstance(outcome, CommunicationError) for outcome in outcomes)


def test_two_processes_of_one_rank_are_refused() -> None:
    outcomes = together([(0, 2), (1, 2), (1, 2)])
    assert sum("another process has joined as rank 1" in str(outcome) for outcome in outcomes) == 1


def test_gangs_live_side_by_side_and_one_after_another() -> None:
    """The groups are private: a process may be in several gangs, and no default group is left behind."""
    gangs = [together([(0, 2), (1, 2)]) for _ in range(3)]
    for gang in gangs:
        results: dict[int, Tensor] = {}

        def reduce(comm: TorchCommunicator, results: dict[int, Tensor] = results) -> None:
            results[comm.rank] = comm.all_reduce(torch.tensor([comm.rank + 1.0]))

        threads = [threading.Thread(target=reduce, args=(comm,)) for comm in gang]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [results[0].item(), results[1].item()] == [3.0, 3.0]
    assert not torch.distributed.is_initialized()
    for comm in [comm for gang in gangs for comm in gang]:
        comm.close()


def test_a_collective_gives_up_at_its_deadline() -> None:
    comm, idle_peer = together([(0, 2), (1, 2)], collective_timeout_s=1.0)
    started = time.monotonic()
    with pytest.raises(CommunicationError, match=r"all_reduce failed on rank 0 of 2 after \d+\.\d s: .*imed out"):
        comm.all_reduce(torch.ones(3))
    assert time.monotonic() - started > 0.9
    comm.close()
    idle_peer.close()


DOOMED_RANK = """
import os, sys
from gemray_workers.parallel.torch_communicator import join_gang
join_gang(1, 2, sys.argv[1], device="cpu", timeout_s=600.0)
os._exit(9)
"""


def test_a_collective_fails_when_a_peer_dies() -> None:
    """A peer's death is noticed by its closed connection, long before the deadline."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    doomed = subprocess.Popen([sys.executable, "-c", DOOMED_RANK, rendezvous])
    comm = join_gang(0, 2, rendezvous, device="cpu", timeout_s=2 * HANG_S)  # pytest's own timeout comes before
    with pytest.raises(CommunicationError, match="all_gather failed on rank 0 of 2"):
        comm.all_gather(torch.ones(3))
    assert doomed.wait(HANG_S) == 9
    comm.close()
