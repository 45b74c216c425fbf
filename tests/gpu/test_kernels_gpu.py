"""Every Triton kernel on CUDA against its reference in float64, at the shapes of the published models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.kernels import attention_input_rows
from support.kernels.capture import captured_and_eager
from support.kernels.fused_parity import fused_runs
from support.kernels.kernel_parity import (
    AttentionCase,
    accepted_transposed,
    kernel_errors,
    kernel_runs,
    router_differences,
)
from support.kernels.row_parity import layouts_accepted, row_differences

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
SUMS_OF_PRODUCTS = ("gated_experts", "gelu_linear", "silu_linear")
"""Kernels whose long sums are taken in another order than the library's."""
DECODE = [(1, 1), (1, 17), (1, 4000), (1, 513), (1, 1024)]
VERIFY = [(5, 700), (17, 2049), (16, 16), (1, 130), (9, 3000)]
MIXED = [(300, 1500), (1, 600), (5, 90), (33, 33), (64, 1100), (32, 640)]
GROUPS = {
    "31B sliding": (32, 16, 256, 1024),
    "31B full": (32, 4, 512, None),
    "26B-A4B full": (16, 2, 512, None),
    "E2B sliding": (8, 1, 256, 512),
    "E4B full": (8, 2, 512, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [DECODE, VERIFY, MIXED], ids=["decode", "verify", "mixed"])
@pytest.mark.parametrize("group", GROUPS)
def test_attention_of_the_target(group: str, lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    from gemray_kernels.triton.paged_attention import paged_attention

    heads, kv_heads, head_dim, window = GROUPS[group]
    for page_size in (16, 32):
        case = AttentionCase(lengths, heads, kv_heads, head_dim, page_size, window)
        assert case.error(paged_attention, dtype, "cuda", seed=len(lengths)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "causal"), [(2048, True), (2048, False), (None, False), (None, True)])
def test_attention_of_a_block_drafter(window: int | None, causal: bool, dtype: torch.dtype) -> None:
    from gemray_kernels.triton.paged_attention import paged_attention

    lengths = [(16, 16), (16, 600), (8, 5000), (2, 2049), (40, 3000)]
    case = AttentionCase(lengths, 64, 8, 128, window=window, causal=causal, scale=128**-0.5)
    assert case.error(paged_attention, dtype, "cuda", seed=3) < TOLERANCE[dtype]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """The same bits alone and in a batch, at every batch size."""
    from gemray_kernels.triton.paged_attention import paged_attention

    case = AttentionCase([(5, 3000), (5, 90), (5, 1024), (5, 17), (5, 2500)], 32, 4, 512)
    q_TND, k_pages, v_pages, table_SP, start_Z, kv_len_S = case.batch(torch.bfloat16, "cuda", seed=5)
    arguments: dict[str, Any] = {"window": None, "causal": True, "scale": 1.0}
    together = paged_attention(q_TND, k_pages, v_pages, table_SP, start_Z, kv_len_S, **arguments)
    for s in range(5):
        rows = slice(5 * s, 5 * s + 5)
        alone = paged_attention(
            q_TND[rows], k_pages, v_pages, table_SP[s : s + 1], start_Z[:2], kv_len_S[s : s + 1], **arguments
        )
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_the_other_kernels(rows: int, dtype: torch.dtype) -> None:
    from gemray_kernels.table import triton_kernels

    runs = kernel_runs("cuda", rows, rows=rows, width=2816, heads=16, kv_heads=8, head_dim=256, experts=128, top_k=8)
    errors = kernel_errors(triton_kernels(), runs, dtype)
    assert len(errors) == len(runs) > 6
    assert {name: error for name, error in errors.items() if not error < TOLERANCE[dtype]} == {}


def test_equal_logits_choose_the_reference_s_experts() -> None:
    from gemray_kernels.table import REFERENCE, triton_kernels

    assert router_differences(triton_kernels(), "cuda") == 0
    logits = torch.randint(0, 4, (512, 128)).float()
    scale = torch.ones(128)
    on_cpu = REFERENCE.route(logits.unsqueeze(0), scale, 8)[1]
    assert torch.equal(REFERENCE.route(logits.unsqueeze(0).cuda(), scale.cuda(), 8)[1].cpu(), on_cpu)


def test_layouts_that_no_kernel_reads_are_refused() -> None:
    from gemray_kernels.table import triton_kernels

    assert accepted_transposed(triton_kernels(), "cuda") == []


def test_bfloat16_is_rounded_where_the_references_round() -> None:
    """All but a few elements have the very bits of separate operations; sums in another order move the rest by one."""
    from gemray_kernels.table import REFERENCE, triton_kernels

    runs = kernel_runs("cuda", 1, rows=64, width=2816, heads=16, kv_heads=8, head_dim=256, experts=128, top_k=8)
    del runs["route"]  # works on float32 logits whatever the dtype; its error is measured above
    for name, run in runs.items():
        found, expected = run(triton_kernels(), torch.bfloat16), run(REFERENCE, torch.bfloat16)
        assert (found != expected).double().mean() < (0.1 if name in SUMS_OF_PRODUCTS else 0.01), name


def test_a_row_of_nan_logits_leaves_the_other_rows_their_experts() -> None:
    from gemray_kernels.triton.experts import gated_experts
    from gemray_kernels.triton.routing import route

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 128, generator=generator).cuda()
    x, scale = torch.randn(40, 256, generator=generator).cuda(), torch.ones(128, device="cuda")
    gate_up, down = torch.randn(128, 64, 256, device="cuda") / 16, torch.randn(128, 256, 32, device="cuda") / 6
    clean = gated_experts(x, *route(logits.unsqueeze(0), scale, 8), gate_up, down)
    logits[3] = torch.nan
    weights, experts = route(logits.unsqueeze(0), scale, 8)
    assert weights[3].isnan().all()
    assert len(set(experts[3].tolist())) == 8
    found = gated_experts(x, weights, experts, gate_up, down)
    assert found[3].isnan().all()
    others = torch.arange(40, device="cuda") != 3
    assert torch.equal(found[others], clean[others])


def test_no_launch_waits_for_the_device_and_a_graph_holds_them() -> None:
    from gemray_kernels.table import triton_kernels
    from gemray_kernels.triton.paged_attention import paged_attention

    kernels = triton_kernels()
    runs = kernel_runs("cuda", 2, rows=8, width=2816, heads=16, kv_heads=8, head_dim=256, experts=128, top_k=8)
    runs = {name: run for name, run in runs.items() if name not in ("route",)}
    case = AttentionCase([(5, 3000), (5, 90), (40, 1024)], 32, 4, 512)
    batch = case.batch(torch.bfloat16, "cuda", seed=1)

    def everything() -> list[torch.Tensor]:
        found = [run(kernels, torch.bfloat16) for run in runs.values()]
        return [*found, paged_attention(*batch, window=None, causal=True, scale=1.0)]

    for name, (found, wanted) in zip([*runs, "attention"], captured_and_eager(everything), strict=True):
        assert torch.equal(found, wanted), name


def test_row_kernels_equal_their_references() -> None:
    """Integers: every one, for sequences anywhere in their texts and for padding."""
    from gemray_kernels.table import triton_row_kernels

    assert not row_differences(triton_row_kernels(), "cuda", range(40))
    assert not layouts_accepted(triton_row_kernels(), "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_fused_kernels(rows: int, dtype: torch.dtype) -> None:
    from gemray_kernels.table import triton_kernels

    runs = fused_runs("cuda", rows, rows=rows, width=2816, heads=16, kv_heads=8, head_dim=256, experts=128, top_k=8)
    limit = 3e-6 if dtype == torch.float32 else TOLERANCE[dtype]
    errors = kernel_errors(triton_kernels(), runs, dtype)
    assert not {name: error for name, error in errors.items() if not error < limit}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_and_embeddings_equal_separate_operations_to_the_bit(dtype: torch.dtype) -> None:
    from gemray_kernels.table import REFERENCE, triton_kernels

    runs = fused_runs("cuda", 3, rows=512, width=512, heads=2, kv_heads=1, head_dim=64, experts=4, top_k=2)
    for name in ("rope_tables", "embed", "embed, few ids known"):
        assert torch.equal(runs[name](triton_kernels(), dtype), runs[name](REFERENCE, dtype)), name


@pytest.mark.parametrize("has_v", [True, False])
@pytest.mark.parametrize("shape", attention_input_rows.SHAPES)
def test_attention_inputs_do_not_depend_on_the_rows_of_a_call(shape: str, has_v: bool) -> None:
    from gemray_kernels.table import triton_kernels

    many, few, expected = attention_input_rows.numbers_of_rows(
        triton_kernels(), "cuda", torch.bfloat16, rows=300, shape=shape, has_v=has_v, few=7
    )
    for one, other, wanted in zip(many, few, expected, strict=True):
        assert torch.equal(one, other)
        assert float((one.double() - wanted).norm() / wanted.norm()) < 1e-2
