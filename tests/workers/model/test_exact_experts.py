"""A layer of experts in exact numerics: the same bits on 1, 2 and 4 ranks, alone and among other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemray_kernels.numerics import Numerics
from gemray_workers.model.config import MoEConfig
from gemray_workers.model.moe import Experts
from gemray_workers.model.weight_sharding import WeightSharding
from gemray_workers.parallel.communicator import Communicator
from support.processes.gang import RunOnGang

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K, ROWS = 96, 64, 8, 3, 30
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def outputs_on_rank(comm: Communicator, numerics: Numerics, dtype: torch.dtype, rows: list[int]) -> Tensor:
    """Weighted outputs [T, H] of some rows of a fixed input, in float64, from weights that the ranks share."""
    moe = MoEConfig(num_experts=NUM_EXPERTS, top_k=TOP_K, intermediate_size=WIDTH)
    sharding = WeightSharding(comm.rank, comm.size, dtype, torch.device("cpu"), numerics=numerics)
    experts = Experts("experts", HIDDEN, moe, comm, sharding)
    for seed, target in enumerate(experts.weight_targets()):
        whole = random(*target.shape, seed=seed, dtype=dtype) / target.shape[-1] ** 0.5
        for copy in target.copies:
            copy.destination.copy_(whole[copy.source])
    x_TH, weights_TK = random(ROWS, HIDDEN, seed=7, dtype=dtype), random(ROWS, TOP_K, seed=8, dtype=dtype).abs()
    chosen_TK = random(ROWS, NUM_EXPERTS, seed=9, dtype=torch.float64).argsort(dim=1)[:, :TOP_K].contiguous()
    outputs_TKH, used_TK = experts(x_TH[rows], weights_TK[rows], chosen_TK[rows])
    return (outputs_TKH.double() * used_TK.double().unsqueeze(-1)).sum(dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_have_the_bits_of_one(run_on_gang: RunOnGang, size: int, dtype: torch.dtype) -> None:
    rows = list(range(ROWS))
    [alone] = run_on_gang(1, outputs_on_rank, Numerics.EXACT, dtype, rows)
    found = run_on_gang(size, outputs_on_rank, Numerics.EXACT, dtype, rows)
    assert all(torch.equal(output, alone) for output in found)


def test_what_fast_numerics_add_over_ranks_would_show(run_on_gang: RunOnGang) -> None:
    rows = list(range(ROWS))
    [alone] = run_on_gang(1, outputs_on_rank, Numerics.FAST, torch.bfloat16, rows)
    assert not torch.equal(run_on_gang(2, outputs_on_rank, Numerics.FAST, torch.bfloat16, rows)[0], alone)


@pytest.mark.parametrize("size", [1, 2])
def test_a_row_has_the_same_bits_alone(run_on_gang: RunOnGang, size: int) -> None:
    together = run_on_gang(size, outputs_on_rank, Numerics.EXACT, torch.float32, list(range(ROWS)))[0]
    for row in (0, 11, ROWS - 1):
        alone = run_on_gang(size, outputs_on_rank, Numerics.EXACT, torch.float32, [row])[0]
        assert torch.equal(alone[0], together[row])
