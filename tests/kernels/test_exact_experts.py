"""Experts in exact numerics: the reference, and the Triton kernels interpreted on the CPU and compiled for Hopper."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from gemray_kernels.numerics import NUM_SHARDS
from gemray_kernels.reference import experts, routing
from gemray_kernels.reference.exact_experts import expert_outputs, expert_subtrees
from gemray_kernels.reference.layer_norms import Norm
from gemray_kernels.table import REFERENCE
from support.kernels.exact_experts import (
    ExpertsCase,
    pairs_that_differ,
    pairs_that_differ_over_ranks,
    random_case,
)
from support.kernels.interpreted import interpreted
from support.kernels.kernel_parity import relative_error

COUNTS = (1, 2, 3, 7, 16, 17, 40)
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def case_of(dtype: torch.dtype) -> ExpertsCase:
    return random_case(rows=40, hidden=48, width=40, experts=6, top_k=3, dtype=dtype, device="cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    assert pairs_that_differ(expert_outputs, case_of(dtype), COUNTS, probes=12) == dict.fromkeys(COUNTS, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_does_not_depend_on_the_number_of_ranks(dtype: torch.dtype) -> None:
    found = pairs_that_differ_over_ranks(expert_outputs, expert_subtrees, case_of(dtype), torch.arange(40))
    assert found == {1: 0, 2: 0, 4: 0, 8: 0}


def test_a_split_that_follows_the_number_of_rows_is_seen() -> None:
    def faulty(x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, leaves: int) -> Tensor:
        return expert_outputs(x, experts, gate_up, down, leaves if len(x) <= 16 else leaves // 2)

    found = pairs_that_differ(faulty, case_of(torch.float32), COUNTS, probes=12)
    assert {count for count, pairs in found.items() if pairs} == {17, 40}


def test_parts_that_are_rounded_or_added_in_rank_order_are_seen() -> None:
    def rounded(x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, leaves: int) -> Tensor:
        return expert_subtrees(x, experts, gate_up, down, leaves).bfloat16().float()

    found = pairs_that_differ_over_ranks(expert_outputs, rounded, case_of(torch.bfloat16), torch.arange(40))
    assert all(found[size] > 0 for size in (2, 4, 8))


def test_a_library_s_products_are_seen() -> None:
    """What fast numerics compute on a CPU depends on how rows fall on experts."""

    def fast(x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, leaves: int) -> Tensor:
        return routing.expert_outputs(x, experts, gate_up, down)

    case = random_case(rows=40, hidden=512, width=256, experts=6, top_k=3, dtype=torch.float32, device="cpu")
    assert any(pairs_that_differ(fast, case, COUNTS, probes=12).values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_are_those_of_fast_numerics_but_for_the_order(dtype: torch.dtype) -> None:
    case = case_of(dtype)
    wide = [x.double() for x in (case.x_TH, case.gate_up_E2IH, case.down_EHI)]
    expected = routing.expert_outputs(wide[0], case.experts_TK, *wide[1:])
    found = case.outputs(expert_outputs, torch.arange(40))
    assert relative_error(found, expected) < (1e-14 if dtype == torch.float64 else 1e-6)
    weights_TK = torch.rand(40, 3)
    expected_TH = (expected * weights_TK.double().unsqueeze(-1)).sum(dim=1)
    assert relative_error(experts.weighted_sum(found, weights_TK, dtype), expected_TH) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_router_and_the_reader_take_each_row_for_itself(dtype: torch.dtype) -> None:
    """Choice and weights of a row's experts, and the stream behind their sum, alone and among others."""
    wide = torch.promote_types(torch.float32, dtype)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    parts_STE, scale_E = random(8, 70, 24).to(wide), random(24).to(dtype)
    x_TH, dense_STH = random(70, 88).to(dtype), random(4, 70, 88).to(wide)
    routed_TKH, norm = random(70, 3, 88).to(dtype), Norm(random(88).to(dtype), 1e-6)
    scale = random(1).to(dtype)

    def results(rows: slice) -> list[Tensor]:
        weights_TK, experts_TK = REFERENCE.route(parts_STE[:, rows], scale_E, 3)
        stream = REFERENCE.add_experts_then_norms(
            x_TH[rows], dense_STH[:, rows], norm, routed_TKH[rows], weights_TK, norm, norm, scale, [norm]
        )
        return [weights_TK, experts_TK, *stream]

    together = results(slice(None))
    for row in range(70):
        for alone, whole in zip(results(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone[0], whole[row])


def test_a_row_s_experts_are_added_in_order() -> None:
    outputs_TKH, weights_TK = torch.randn(5, 8, 88), torch.rand(5, 8)
    expected_TH = torch.zeros(5, 88)
    for k in range(8):
        expected_TH = expected_TH + outputs_TKH[:, k] * weights_TK[:, k : k + 1]
    assert torch.equal(experts.weighted_sum(outputs_TKH, weights_TK, torch.float32), expected_TH)


def test_a_width_that_has_not_so_many_leaves_is_refused() -> None:
    case = random_case(rows=2, hidden=16, width=12, experts=4, top_k=2, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="8 leaves of 12 inputs"):
        case.outputs(expert_outputs, torch.arange(2))


def test_tiles_whose_products_would_be_computed_twice_are_refused() -> None:
    """Triton gives all warps rows of the left operand, 16 each: of two warpgroups on 64 rows one repeats the other."""
    pytest.importorskip("triton", reason="triton is to be had on Linux alone")
    from gemray_kernels.triton import exact_experts
    from gemray_kernels.triton.expert_tile import ExpertTile

    case = case_of(torch.float32)
    tile = ExpertTile(pairs=64, outputs=128, inputs=64, num_warps=8, num_stages=2)
    with pytest.raises(ValueError, match="8 warps on 64 rows: at most one warp for 16 rows"):
        exact_experts.expert_outputs(case.x_TH, case.experts_TK, case.gate_up_E2IH, case.down_EHI, 8, tile)


@pytest.mark.slow
def test_interpreted_kernels_hold_the_same() -> None:
    pytest.importorskip("triton", reason="triton is to be had on Linux alone")
    found = dict(line.split("\t") for line in interpreted("exact_experts").splitlines())
    assert float(found.pop("relative error")) < 1e-6
    assert int(found.pop("a split that follows the rows")) > 0
    assert len(found) == 3 + 1 + 2 + 4 + 2
    assert {name for name, count in found.items() if count != "0"} == set()


@pytest.mark.parametrize("rows", [4, 40, 300])
@pytest.mark.parametrize("width", [32, 256, 704])
def test_the_compiler_adds_leaves_as_they_are(width: int, rows: int) -> None:
    """No leaf, of one block (32 inputs), a part of one (4) or several (88), begins with another's sum."""
    pytest.importorskip("triton", reason="triton is to be had on Linux alone")
    from gemray_kernels.triton import exact_experts
    from support.kernels.triton_compile import compile_launches

    x_TH, experts_TK = torch.empty(rows, 64, dtype=torch.bfloat16), torch.zeros(rows, 2, dtype=torch.int64)
    gate_up, down = (torch.empty(4, *shape, dtype=torch.bfloat16) for shape in ((2 * width, 64), (64, width)))
    found = compile_launches(lambda: exact_experts.expert_outputs(x_TH, experts_TK, gate_up, down, 8))
    assert found[-1].ttir.count("arith.addf") == 3
    assert found[-1].ttir.count("tt.dot") == (2 if width < 704 else 4)


@pytest.mark.parametrize("rows", [40, 400])
@pytest.mark.parametrize(("width", "leaves"), [(704, 8), (352, 4), (176, 2), (1024, 8)])
def test_every_leaf_s_products_are_computed(width: int, leaves: int, rows: int) -> None:
    """No loop over leaves has trips that ptxas could count: of Triton 3.6's code it lost all products but the last."""
    pytest.importorskip("triton", reason="triton is to be had on Linux alone")
    from gemray_kernels.triton import exact_experts
    from support.kernels.triton_compile import compile_launches

    x_TH, experts_TK = torch.empty(rows, 64, dtype=torch.bfloat16), torch.zeros(rows, 2, dtype=torch.int64)
    gate_up, down = (torch.empty(4, *shape, dtype=torch.bfloat16) for shape in ((2 * width, 64), (256, width)))
    found = compile_launches(lambda: exact_experts.expert_outputs(x_TH, experts_TK, gate_up, down, leaves))
    assert ("wgmma" in found[-1].ptx) == (rows > 256)
    assert set(re.findall(r"scf\.for .* to %(\w+) step", found[-1].ttir)) == ({"num_twins"} if leaves > 2 else set())
    assert not any(kernel.lost_products for kernel in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (16, 8), (100, 2), (2048, 1), (2048, 4)])
def test_experts_compile_for_hopper(rows: int, size: int, dtype: torch.dtype) -> None:
    """The published hidden size and width."""
    pytest.importorskip("triton", reason="triton is to be had on Linux alone")
    from gemray_kernels.triton import exact_experts
    from support.kernels.triton_compile import MAX_SHARED_BYTES, compile_launches

    x_TH, experts_TK = torch.empty(rows, 2816, dtype=dtype), torch.zeros(rows, 8, dtype=torch.int64)
    gate_up, down = torch.empty(4, 1408 // size, 2816, dtype=dtype), torch.empty(4, 2816, 704 // size, dtype=dtype)
    leaves = NUM_SHARDS // size
    found = compile_launches(lambda: exact_experts.expert_outputs(x_TH, experts_TK, gate_up, down, leaves))
    assert len(found) == (2 if rows <= 16 else 3)
    for kernel in found:
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
        assert (kernel.stack_bytes or 0) <= 16, "registers spill"
    if leaves > 2:  # two and fewer are one step of the loop
        assert "cp.async" in found[-1].ptx, "leaves are not loaded ahead of their use"
