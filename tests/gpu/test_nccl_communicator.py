"""TorchCommunicator over NCCL: each rank of a gloo gang joins a second gang, on a GPU of its own."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from torch import Tensor

from gemray_kernels.numerics import tree_sum
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.self_test import self_test
from support.engine.gpu import join_on_gpu, needs_gpus
from support.processes.gang import RunOnGang

pytestmark = [pytest.mark.gpu, pytest.mark.cards(4)]

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
COUNTS = [0, 1, 5, 1000, 4099, 1 << 20]


@pytest.fixture(params=[1, 2, 4])
def size(request: pytest.FixtureRequest) -> int:
    """Ranks of the gang, as many as there are GPUs for."""
    needs_gpus(request.param)
    return int(request.param)


def input_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * count + rank)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def collectives(comm: Communicator) -> tuple[list[Tensor], Tensor, bytes]:
    gpus = join_on_gpu(comm)
    try:
        self_test(gpus, device="cuda", dtypes=DTYPES)
        sums = [gpus.all_reduce(input_of(gpus.rank, count, d).cuda()).cpu() for d in DTYPES for count in COUNTS]
        gathered = gpus.all_gather(torch.full((2, 3), gpus.rank, device="cuda")).cpu()
        gpus.barrier()
        return sums, gathered, gpus.broadcast_bytes(b"plan" if gpus.rank == 0 else None)
    finally:
        gpus.close()


def test_collectives_on_gpus(run_on_gang: RunOnGang, size: int) -> None:
    by_rank = run_on_gang(size, collectives)
    for i, (dtype, count) in enumerate((dtype, count) for dtype in DTYPES for count in COUNTS):
        inputs = torch.stack([input_of(rank, count, dtype) for rank in range(size)]).double()
        allowed = torch.finfo(dtype).eps * size * inputs.abs().sum(0)
        assert ((by_rank[0][0][i].double() - inputs.sum(0)).abs() <= allowed).all(), (dtype, count)
        assert all(torch.equal(sums[i], by_rank[0][0][i]) for sums, _, _ in by_rank), (dtype, count)
    for _, gathered, payload in by_rank:
        assert torch.equal(gathered, torch.arange(size).view(size, 1, 1).expand(size, 2, 3))
        assert payload == b"plan"


def reduce_by_tree(comm: Communicator) -> list[bool]:
    """Several parts a rank, in one kernel where they are small and over NCCL."""
    gpus = join_on_gpu(comm)
    right = []
    try:
        for one_shot in (False, True):
            if one_shot:
                gpus.use_one_shot(torch.device("cuda", torch.cuda.current_device()))
            for count, num_parts in itertools.product((1, 5376 * 8, 5376 * 100), (1, 2, 4)):
                generator = torch.Generator().manual_seed(count)
                everyones = torch.randn(gpus.size, num_parts, count, generator=generator)
                found = gpus.all_reduce_tree(everyones[gpus.rank].cuda(), torch.bfloat16).cpu()
                right.append(torch.equal(found, tree_sum(everyones.flatten(0, 1)).bfloat16()))
        return right
    finally:
        gpus.close()


def test_parts_are_added_by_the_tree_of_all_ranks(run_on_gang: RunOnGang, size: int) -> None:
    for right in run_on_gang(size, reduce_by_tree):
        assert len(right) == 18
        assert all(right)


def reduce_in_a_graph(comm: Communicator) -> list[float]:
    gpus = join_on_gpu(comm)
    try:
        x = torch.ones(4, device="cuda")
        gpus.all_reduce(x.clone())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = gpus.all_reduce(x * 2)
        totals = []
        for step in range(3):
            x.fill_(gpus.rank + step)
            graph.replay()
            totals.append(y[0].item())
        del graph
        return totals
    finally:
        torch.cuda.synchronize()
        gpus.close()


def test_all_reduce_is_captured_in_a_cuda_graph(run_on_gang: RunOnGang, size: int) -> None:
    expected = [2.0 * sum(rank + step for rank in range(size)) for step in range(3)]
    assert run_on_gang(size, reduce_in_a_graph) == [expected] * size


def abort_a_hang(comm: Communicator) -> float:
    gpus = join_on_gpu(comm)
    gpus.all_reduce(torch.ones(1, device="cuda"))  # NCCL connects its channels at the first collective
    torch.cuda.synchronize()
    waited = 0.0
    if comm.rank == 0:
        gpus.all_reduce(torch.ones(1 << 20, device="cuda"))  # the peer never comes
        threading.Timer(1.0, gpus.abort).start()
        started = time.monotonic()
        torch.cuda.synchronize()
        waited = time.monotonic() - started
    comm.barrier()
    if comm.rank != 0:
        gpus.abort()
    return waited


def test_abort_frees_a_gpu_that_waits_for_its_peer(run_on_gang: RunOnGang) -> None:
    needs_gpus(2)
    waited = run_on_gang(2, abort_a_hang, timeout_s=40.0)[0]
    assert 0.5 < waited < 20.0
