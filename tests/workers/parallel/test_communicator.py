"""TorchCommunicator on gloo: what each collective returns."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from gemray_kernels.numerics import tree_sum
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator
from support.processes.gang import RunOnGang

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


def sums_of_subgroups(comm: Communicator) -> list[float]:
    """Sums over two subgroups of one name, one after the other; the last rank takes no part."""
    assert isinstance(comm, TorchCommunicator)
    if comm.rank == comm.size - 1:
        return []
    return [float(comm.subgroup(2, "pair").all_reduce(torch.tensor([comm.rank + 1.0])).item()) for _ in range(2)]


def test_a_subgroups_name_may_come_again(run_on_gang: RunOnGang) -> None:
    assert run_on_gang(3, sums_of_subgroups) == [[3.0, 3.0], [3.0, 3.0], []]
