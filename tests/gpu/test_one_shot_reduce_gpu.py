"""All-reduce in one kernel over memory that the devices write into each other's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference.layer_norms import total
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.self_test import self_test
from gemray_workers.parallel.torch_communicator import TorchCommunicator
from support.engine.gpu import needs_gpus
from support.processes.gang import RunOnGang

pytestmark = [pytest.mark.gpu, pytest.mark.cards(4)]

DTYPES = [torch.bfloat16, torch.float32]
COUNTS = [1, 5, 1023, 5376, 5376 * 8, 5376 * 16, 5376 * 40, 262144, 5376 * 120]


def part_of(rank: int, turn: int) -> Tensor:
    """What `rank` gives to the reduction number `turn`."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    count = COUNTS[turn % len(COUNTS)]
    return torch.randn(count, generator=generator, dtype=torch.float64).to(DTYPES[turn % len(DTYPES)])


def expected(turn: int, size: int) -> Tensor:
    """The sum by the tree, or of three ranks in order, in float32, rounded once."""
    parts = torch.stack([part_of(rank, turn).float() for rank in range(size)])
    return total(parts, DTYPES[turn % len(DTYPES)])


def reduce_in_turn(comm: Communicator) -> list[bool]:
    """Eager reductions of many sizes, a graph of them that is replayed, and both by turns; which sums were right."""
    assert isinstance(comm, TorchCommunicator)
    device = torch.device("cuda", comm.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    try:
        comm.use_one_shot(device)
        self_test(comm, device=device, dtypes=DTYPES)
        add_up = comm._one_shot  # also what `all_reduce` gives to NCCL, which takes no card with two ranks
        assert add_up is not None
        turns = range(3 * len(COUNTS))
        right = [torch.equal(add_up(part_of(comm.rank, t).cuda()).cpu(), expected(t, comm.size)) for t in turns]
        captured = [0, 3, 5, 3, 8, 2]
        inputs = [part_of(comm.rank, t).cuda() for t in captured]
        comm.all_reduce(inputs[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [add_up(x) for x in inputs]
        for replay in range(50):
            for x in results:
                x.zero_()
            graph.replay()
            again = add_up(part_of(comm.rank, replay).cuda())
            right += [torch.equal(x.cpu(), expected(t, comm.size)) for x, t in zip(results, captured, strict=True)]
            right.append(torch.equal(again.cpu(), expected(replay, comm.size)))
        del graph
        return right
    finally:
        torch.cuda.synchronize()
        comm.drop_one_shot()


@pytest.mark.parametrize("size", [2, 4])
def test_sums_in_rank_order_eagerly_and_in_graphs(run_on_gang: RunOnGang, size: int) -> None:
    """Ranks share a card where there are fewer: it lets them run by turns."""
    needs_gpus(1)
    by_rank = run_on_gang(size, reduce_in_turn)
    assert len(by_rank[0]) == 3 * len(COUNTS) + 50 * 7
    assert all(all(right) for right in by_rank)
