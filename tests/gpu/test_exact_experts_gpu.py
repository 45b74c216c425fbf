"""Experts in exact numerics on CUDA at the published shape: the same bits for any rows, experts, tiles and ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference.layer_norms import Norm
from support.kernels.capture import captured_and_eager
from support.kernels.exact_experts import ExpertsCase, pairs_that_differ, pairs_that_differ_over_ranks, random_case
from support.kernels.kernel_parity import poisoned_memory, relative_error

pytestmark = pytest.mark.gpu

COUNTS = (1, 2, 5, 8, 16, 17, 32, 64, 256, 257, 512, 1000, 2048, 8192)
PROBES = 24
ERROR = {torch.bfloat16: 5e-3, torch.float32: 3e-6}


def published(dtype: torch.dtype, *, experts: int = 128, rows: int = 8192) -> ExpertsCase:
    """26B-A4B's layer."""
    return random_case(rows=rows, hidden=2816, width=704, experts=experts, top_k=8, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_pair_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    from gemray_kernels.triton.exact_experts import expert_outputs

    counts = COUNTS if dtype == torch.bfloat16 else COUNTS[:11]
    case = published(dtype, rows=counts[-1])
    with poisoned_memory():
        found = pairs_that_differ(expert_outputs, case, counts, PROBES)
    assert found == dict.fromkeys(counts, 0)


def test_rows_that_all_choose_the_same_experts() -> None:
    """As many pairs an expert as there are rows, and 16 experts that many rows share."""
    from gemray_kernels.triton.exact_experts import expert_outputs

    case = published(torch.bfloat16, experts=16, rows=1024)
    assert pairs_that_differ(expert_outputs, case, (4, 16, 40, 300, 1024), PROBES) == dict.fromkeys(
        (4, 16, 40, 300, 1024), 0
    )


@pytest.mark.parametrize("rows", [1, 16, 40, 600])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_pair_does_not_depend_on_the_number_of_ranks(dtype: torch.dtype, rows: int) -> None:
    from gemray_kernels.triton.exact_experts import expert_outputs, expert_subtrees

    case = published(dtype, experts=32, rows=rows)
    with poisoned_memory():
        found = pairs_that_differ_over_ranks(expert_outputs, expert_subtrees, case, torch.arange(rows))
    assert found == {1: 0, 2: 0, 4: 0, 8: 0}


def test_tiles_change_no_bit() -> None:
    """Whichever tile a call takes, by mma.sync or wgmma, and however often: speed alone may choose."""
    from gemray_kernels.triton.exact_experts import expert_outputs
    from gemray_kernels.triton.expert_tile import ExpertTile

    case = published(torch.bfloat16, experts=32, rows=300)
    arguments = (case.x_TH, case.experts_TK, case.gate_up_E2IH, case.down_EHI, 8)
    expected = expert_outputs(*arguments)
    tiles = [
        ExpertTile(pairs, outputs, inputs, num_warps=warps, num_stages=2, weight_first=weight_first)
        for (pairs, outputs, warps), inputs, weight_first in itertools.product(
            ((16, 32, 4), (16, 64, 4), (32, 64, 4), (64, 64, 4), (64, 128, 8)), (16, 64), (False, True)
        )
        if warps == 4 or weight_first  # 64 rows of the left operand are too few for 8 warps
    ]
    again = sum(int((expert_outputs(*arguments) != expected).sum()) for _ in range(10))
    differing = {tile: int((expert_outputs(*arguments, tile) != expected).sum()) for tile in tiles}
    assert again == 0
    assert {tile: numbers for tile, numbers in differing.items() if numbers} == {}


@pytest.mark.parametrize("width", [128, 256, 512, 1024])
def test_other_widths_against_float64(width: int) -> None:
    """Leaves of one block and of whole blocks, few rows and a prompt's: no leaf is lost and none counts twice."""
    from gemray_kernels.reference.routing import expert_outputs as reference
    from gemray_kernels.triton.exact_experts import expert_outputs

    case = random_case(rows=400, hidden=512, width=width, experts=16, top_k=4, dtype=torch.bfloat16, device="cuda")
    wide = [x.double() for x in (case.x_TH, case.gate_up_E2IH, case.down_EHI)]
    expected = reference(wide[0], case.experts_TK, *wide[1:])
    for rows in (1, 40, 400):
        found = case.outputs(expert_outputs, torch.arange(rows))
        assert relative_error(found, expected[:rows]) < ERROR[torch.bfloat16], rows
    assert pairs_that_differ(expert_outputs, case, (1, 40, 400), PROBES) == {1: 0, 40: 0, 400: 0}


def test_a_split_that_follows_the_number_of_rows_is_seen() -> None:
    from gemray_kernels.triton.exact_experts import expert_outputs

    def faulty(x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, leaves: int) -> Tensor:
        return expert_outputs(x, experts, gate_up, down, leaves if len(x) <= 256 else 1)

    case = published(torch.bfloat16, experts=32, rows=600)
    found = pairs_that_differ(faulty, case, (16, 256, 600), PROBES)
    assert found[16] == found[256] == 0 < found[600]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_against_float64(dtype: torch.dtype) -> None:
    from gemray_kernels.reference.routing import expert_outputs as reference
    from gemray_kernels.triton.exact_experts import expert_outputs

    case = published(dtype, experts=16, rows=300)
    wide = [x.double() for x in (case.x_TH, case.gate_up_E2IH, case.down_EHI)]
    expected = reference(wide[0], case.experts_TK, *wide[1:])
    for rows in (1, 16, 300):
        found = case.outputs(expert_outputs, torch.arange(rows))
        assert relative_error(found, expected[:rows]) < ERROR[dtype], rows


def test_the_router_and_the_reader_take_each_row_for_itself() -> None:
    """Choice and weights of a row's experts, and the stream behind their sum, alone and among others."""
    from gemray_kernels.table import triton_kernels

    kernels = triton_kernels()
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    parts_STE, scale_E = random(8, 2048, 128, dtype=torch.float32), random(128)
    x_TH, dense_STH = random(2048, 2816), random(4, 2048, 2816, dtype=torch.float32)
    routed_TKH, norm = random(2048, 8, 2816), Norm(random(2816), 1e-6)
    scale_1 = random(1)

    def results(rows: slice) -> list[Tensor]:
        weights_TK, experts_TK = kernels.route(parts_STE[:, rows], scale_E, 8)
        stream = kernels.add_experts_then_norms(
            x_TH[rows], dense_STH[:, rows], norm, routed_TKH[rows], weights_TK, norm, norm, scale_1, [norm]
        )
        return [weights_TK, experts_TK, *stream]

    together = results(slice(None))
    for first, length in ((0, 1), (7, 1), (100, 5), (1000, 32), (1500, 512)):
        rows = slice(first, first + length)
        for alone, whole in zip(results(rows), together, strict=True):
            assert torch.equal(alone, whole[rows])


def test_a_graph_finds_the_same_bits_and_no_launch_waits() -> None:
    from gemray_kernels.triton.exact_experts import expert_outputs, expert_subtrees

    case = published(torch.bfloat16, experts=32, rows=600)

    def everything() -> list[Tensor]:
        weights = (case.gate_up_E2IH, case.down_EHI)
        return [
            sums(case.x_TH[:rows], case.experts_TK[:rows], *weights, 8)
            for rows in (1, 16, 40, 600)
            for sums in (expert_outputs, expert_subtrees)
        ]

    for captured, eager in captured_and_eager(everything):
        assert torch.equal(captured, eager)
