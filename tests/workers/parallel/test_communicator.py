"""TorchCommunicator on gloo: what each collective returns, the start-up self-test, joining and its deadline."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from gemray_kernels.numerics import tree_sum
from gemray_workers.errors import CommunicationError, InvalidField
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.network_interface import choose_interface
from gemray_workers.parallel.self_test import self_test
from gemray_workers.parallel.torch_communicator import TorchCommunicator, join_gang
from support.processes.gang import RunOnGang
from support.waiting import HANG_S

SIZES = [1, 2, 4]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def input_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * count + rank)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def all_reduced(comm: Communicator, counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    return [comm.all_reduce(input_of(comm.rank, count, dtype)) for count in counts]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_sums_to_equal_bits(run_on_gang: RunOnGang, size: int, dtype: torch.dtype) -> None:
    counts = [0, 1, 2, 3, 5, 63, 1000, 4099, 70001]
    by_rank = run_on_gang(size, all_reduced, counts, dtype)
    for i, count in enumerate(counts):
        first = by_rank[0][i]
        assert first.dtype == dtype
        for rank in range(size):
            assert torch.equal(by_rank[rank][i], first), (count, rank)
        inputs = torch.stack([input_of(rank, count, dtype) for rank in range(size)]).double()
        allowed = torch.finfo(dtype).eps * size * inputs.abs().sum(0)
        assert ((first.double() - inputs.sum(0)).abs() <= allowed).all(), count


def parts_of(rank: int, size: int, count: int) -> Tensor:
    """A rank's share of eight leaves, as two parts where it holds as many."""
    leaves = torch.stack([input_of(8 * count + leaf, count, torch.float32) for leaf in range(8)])
    own = leaves[rank * 8 // size : (rank + 1) * 8 // size]
    return torch.stack([tree_sum(half) for half in own.chunk(2)])


def reduced_by_tree(comm: Communicator, counts: list[int]) -> list[tuple[Tensor, Tensor]]:
    inputs = [parts_of(comm.rank, comm.size, count) for count in counts]
    return [(comm.all_reduce_tree(x, torch.float32), comm.all_reduce_tree(x, torch.bfloat16)) for x in inputs]


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_tree_adds_the_same_leaves_in_the_same_order(run_on_gang: RunOnGang, size: int) -> None:
    counts = [0, 1, 3, 1000, 65536, 65537, 70001]  # the last two are added up share by share
    for found in run_on_gang(size, reduced_by_tree, counts):
        for count, (wide, rounded) in zip(counts, found, strict=True):
            expected = tree_sum(parts_of(0, 1, count))
            assert torch.equal(wide, expected)
            assert torch.equal(rounded, expected.bfloat16())


def test_three_ranks_are_no_tree(run_on_gang: RunOnGang) -> None:
    with pytest.raises(Exception, match="3 ranks, which no tree adds up: a power of two is allowed"):
        run_on_gang(3, reduced_by_tree, [1])


def reduce_transposed(comm: Communicator) -> tuple[Tensor, Tensor]:
    x = torch.arange(6.0).view(2, 3).t() * (comm.rank + 1)
    assert torch.equal(comm.all_reduce_tree(x.unsqueeze(0), x.dtype), 10 * torch.arange(6.0).view(2, 3).t())
    return comm.all_reduce(x), comm.all_gather(x)


def test_strided_tensors_keep_their_meaning(run_on_gang: RunOnGang) -> None:
    x = torch.arange(6.0).view(2, 3).t()
    for reduced, gathered in run_on_gang(4, reduce_transposed):
        assert torch.equal(reduced, 10 * x)
        assert torch.equal(gathered, torch.stack([x, 2 * x, 3 * x, 4 * x]))


def gathered(comm: Communicator) -> list[Tensor]:
    return [
        comm.all_gather(torch.tensor(comm.rank)),
        comm.all_gather(torch.full((2, 3), comm.rank, dtype=torch.bfloat16)),
        comm.all_gather(torch.tensor([comm.rank % 2 == 1])),
        comm.all_gather(torch.empty(0, 5)),
    ]


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_is_in_rank_order(run_on_gang: RunOnGang, size: int) -> None:
    ranks = torch.arange(size)
    for scalars, blocks, flags, nothing in run_on_gang(size, gathered):
        assert torch.equal(scalars, ranks)
        assert torch.equal(blocks, ranks.to(torch.bfloat16).view(size, 1, 1).expand(size, 2, 3))
        assert torch.equal(flags, (ranks % 2 == 1).view(size, 1))
        assert nothing.shape == (size, 0, 5)


def payload_of(length: int) -> bytes:
    return (hashlib.sha256(str(length).encode()).digest() * (length // 32 + 1))[:length]


PAYLOAD_LENGTHS = [0, 1, 4095, 4096, 4097, 1 << 20, 0, 7]  # long ones leave no trace in the short ones after them


def broadcasts(comm: Communicator, lengths: list[int]) -> list[str]:
    def payload(length: int) -> bytes | None:
        return payload_of(length) if comm.rank == 0 else None

    return [hashlib.sha256(comm.broadcast_bytes(payload(length))).hexdigest() for length in lengths]


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_bytes_of_every_size(run_on_gang: RunOnGang, size: int) -> None:
    expected = [hashlib.sha256(payload_of(length)).hexdigest() for length in PAYLOAD_LENGTHS]
    assert run_on_gang(size, broadcasts, PAYLOAD_LENGTHS) == [expected] * size


def count_broadcasts(comm: TorchCommunicator, length: int) -> int:
    calls = 0
    host = comm._host

    class Counting:
        def broadcast(self, buffer: Tensor, root: int) -> object:
            nonlocal calls
            calls += 1
            return host.broadcast(buffer, root)

    comm._host = Counting()  # type: ignore[assignment]
    try:
        broadcasts(comm, [length])
    finally:
        comm._host = host
    return calls


def test_small_payloads_take_one_broadcast(run_on_gang: RunOnGang) -> None:
    assert run_on_gang(2, count_broadcasts, 4096) == [1, 1]
    assert run_on_gang(2, count_broadcasts, 4097) == [2, 2]


def misuse_broadcast(comm: Communicator) -> str:
    try:
        comm.broadcast_bytes(b"x" if comm.rank else None)
    except ValueError as error:
        return str(error)
    return "no error"


def test_broadcast_payload_belongs_to_rank_0(run_on_gang: RunOnGang) -> None:
    assert run_on_gang(2, misuse_broadcast) == [
        "rank 0 must give a payload to broadcast",
        "rank 1 gave a payload to broadcast: only rank 0 does",
    ]


# --- self-test --------------------------------------------------------------------------------------------------------


class FaultyCommunicator:
    """A communicator whose all_reduce is spoilt on one rank."""

    def __init__(self, comm: Communicator, faulty_rank: int, dtype: torch.dtype, fault: float) -> None:
        self._comm = comm
        self._fault = fault if comm.rank == faulty_rank else 0.0
        self._dtype = dtype
        self.rank = comm.rank
        self.size = comm.size

    def all_reduce(self, x: Tensor) -> Tensor:
        x = self._comm.all_reduce(x)
        if x.dtype == self._dtype and self._fault:
            x[-1] += self._fault if self._fault == self._fault else torch.nan
        return x

    def all_reduce_tree(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        return self._comm.all_reduce_tree(parts, dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._comm.all_gather(x)

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        return self._comm.broadcast_bytes(payload)

    def barrier(self) -> None:
        self._comm.barrier()


def run_self_test(comm: Communicator) -> None:
    self_test(comm, device="cpu", dtypes=DTYPES)


def self_test_with_fault(comm: Communicator, faulty_rank: int, dtype: torch.dtype, fault: float) -> str:
    try:
        run_self_test(FaultyCommunicator(comm, faulty_rank, dtype, fault))
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("size", SIZES)
def test_self_test_passes_on_gloo(run_on_gang: RunOnGang, size: int) -> None:
    run_on_gang(size, run_self_test)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_self_test_names_the_faulty_rank(run_on_gang: RunOnGang, dtype: torch.dtype) -> None:
    for verdict in run_on_gang(4, self_test_with_fault, 2, dtype, 0.75):
        assert f"all_reduce of 1 {dtype} values on cpu is wrong on rank 2 of 4: off by up to 0.7" in verdict


def test_self_test_catches_nan(run_on_gang: RunOnGang) -> None:
    for verdict in run_on_gang(2, self_test_with_fault, 0, torch.float32, float("nan")):
        assert "is wrong on rank 0 of 2: off by up to nan" in verdict


def test_self_test_catches_bits_that_rounding_would_excuse(run_on_gang: RunOnGang) -> None:
    for verdict in run_on_gang(4, self_test_with_fault, 3, torch.float64, 1e-16):
        assert "gives rank 3 of 4 other bits than rank 0" in verdict


# --- joining ----------------------------------------------------------------------------------------------------------


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


# --- network interface ------------------------------------------------------------------------------------------------


def test_the_interface_of_the_loopback_address() -> None:
    environment: dict[str, str] = {}
    name, reason = choose_interface("127.0.0.1", environment)
    assert "127.0.0.1" in [entry.address for entry in psutil.net_if_addrs()[name]]
    assert environment == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    assert reason == f"{name} holds the node's address 127.0.0.1"


def test_an_interface_that_the_user_set_is_kept() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    name, reason = choose_interface("127.0.0.1", environment)
    assert environment == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": "ib0"}
    assert reason.endswith("; kept as set: NCCL_SOCKET_IFNAME=ib0")


@pytest.mark.parametrize(("node_ip", "allowed"), [("192.0.2.77", "127.0.0.1"), ("localhost", "an IPv4 or IPv6")])
def test_an_address_of_another_node_is_refused(node_ip: str, allowed: str) -> None:
    environment: dict[str, str] = {}
    with pytest.raises(InvalidField, match=rf"node_ip = '{node_ip}' is not allowed: .*{allowed}"):
        choose_interface(node_ip, environment)
    assert environment == {}


def sums_of_subgroups(comm: Communicator) -> list[float]:
    """Sums over two subgroups of one name, one after the other; the last rank takes no part."""
    assert isinstance(comm, TorchCommunicator)
    if comm.rank == comm.size - 1:
        return []
    return [float(comm.subgroup(2, "pair").all_reduce(torch.tensor([comm.rank + 1.0])).item()) for _ in range(2)]


def test_a_subgroups_name_may_come_again(run_on_gang: RunOnGang) -> None:
    assert run_on_gang(3, sums_of_subgroups) == [[3.0, 3.0], [3.0, 3.0], []]
