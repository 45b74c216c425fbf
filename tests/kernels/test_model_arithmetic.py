"""Norms, rotations, activations and linear layers against their formulas and against transformers."""

from __future__ import annotations

import math

import pytest
import torch

from gemray_kernels.precision import compute_dtype, wide_linear
from gemray_kernels.reference.activation import gelu_tanh, gelu_tanh_and_mul
from gemray_kernels.reference.experts import choose_experts
from gemray_kernels.reference.grouped_linear import grouped_linear
from gemray_kernels.reference.rms_norm import rms_norm
from gemray_kernels.reference.rope import apply_rope, inverse_frequencies, rope_cos_sin


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_weight", [True, False])
def test_rms_norm_rounds_as_transformers_does(dtype: torch.dtype, with_weight: bool) -> None:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    theirs = Gemma4RMSNorm(48, eps=1e-6, with_scale=with_weight).to(dtype)
    weight = None
    if with_weight:
        theirs.weight.data = weight = torch.randn(48).to(dtype)
    x = (torch.randn(5, 3, 48) * 10).to(dtype)
    assert torch.equal(rms_norm(x, weight, 1e-6), theirs(x))


def test_equal_logits_choose_the_experts_of_smaller_numbers() -> None:
    logits = torch.zeros(300, 128)
    logits[:, 77] = 1.0
    logits[1, :3] = torch.tensor([-5000.0, -4000.0, -6000.0])  # all of probability 0
    logits[1, 3:] = 200.0
    weights, experts = choose_experts(logits, torch.ones(128), 8)
    assert experts[0].tolist() == [77, 0, 1, 2, 3, 4, 5, 6]
    assert torch.equal(experts[2:], experts[:1].expand(298, 8))
    assert choose_experts(logits[1:2], torch.ones(128), 128)[1][0, -3:].tolist() == [1, 0, 2]
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(300))


def test_rms_norm_in_float64_keeps_its_precision() -> None:
    x = torch.randn(4, 32, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm(x, None, 1e-6), expected, rtol=1e-14, atol=0)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


def test_default_rope_turns_every_pair() -> None:
    frequencies = inverse_frequencies(256, 1e4)
    expected = torch.tensor([1e4 ** (-2 * m / 256) for m in range(128)])
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)


def test_proportional_rope_turns_the_first_pairs_of_the_whole_head() -> None:
    frequencies = inverse_frequencies(512, 1e6, partial_rotary_factor=0.25)
    expected = torch.tensor([1e6 ** (-2 * m / 512) if m < 64 else 0.0 for m in range(256)])
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    x_TND = torch.randn(3, 2, 512)
    turned = apply_rope(x_TND, *rope_cos_sin(torch.tensor([0, 1, 900]), frequencies, torch.float32))
    moved = (turned != x_TND).any(dim=1)
    assert not moved[0].any()
    assert moved[2].nonzero().flatten().tolist() == [*range(64), *range(256, 320)]
    halved = inverse_frequencies(512, 1e6, partial_rotary_factor=0.25, factor=2.0)
    torch.testing.assert_close(halved * 2, frequencies, rtol=1e-6, atol=0)


def test_rope_turns_by_the_angle() -> None:
    frequencies = inverse_frequencies(4, 100.0)
    x_TND = torch.randn(1, 1, 4)
    turned = apply_rope(x_TND, *rope_cos_sin(torch.tensor([7]), frequencies, torch.float32))[0, 0]
    a, b, c, d = x_TND[0, 0].tolist()
    for pair, (first, second), angle in (((0, 2), (a, c), 7.0), ((1, 3), (b, d), 0.7)):
        cos, sin = math.cos(angle), math.sin(angle)
        expected = torch.tensor([first * cos - second * sin, first * sin + second * cos])
        torch.testing.assert_close(turned[list(pair)], expected, rtol=1e-5, atol=1e-6)


def test_scores_of_rotated_heads_depend_on_the_distance_alone() -> None:
    frequencies = inverse_frequencies(64, 1e4)
    q, k = torch.randn(2, 1, 1, 64, dtype=torch.float64)

    def score(query_at: int, key_at: int) -> float:
        at = [rope_cos_sin(torch.tensor([p]), frequencies, torch.float64) for p in (query_at, key_at)]
        return float((apply_rope(q, *at[0]) * apply_rope(k, *at[1])).sum())

    assert score(5, 2) == pytest.approx(score(103, 100), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-2)


def test_gelu_tanh_is_its_formula() -> None:
    x = torch.randn(100, dtype=torch.float64) * 3
    expected = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(gelu_tanh(x), expected, rtol=1e-12, atol=1e-14)
    up = torch.randn(100, dtype=torch.float64)
    torch.testing.assert_close(gelu_tanh_and_mul(torch.cat((x, up))), expected * up, rtol=1e-12, atol=1e-14)


def test_the_compute_dtype_is_at_least_float32() -> None:
    wide = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
    assert {dtype: compute_dtype(dtype) for dtype in wide} == wide


def test_wide_linear_does_not_round_to_the_weights_dtype() -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(20000, 64).bfloat16()  # more than two blocks of rows
    found = wide_linear(x, weight)
    exact = x.double() @ weight.double().t()
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-4
    assert ((x @ weight.t()).double() - exact).abs().max() > 1e-2
    assert wide_linear(x.double(), weight.double()).dtype == torch.float64


@pytest.mark.parametrize("ends", [[2, 2, 7, 7], [0, 0, 0, 7], [7, 7, 7, 7], [1, 3, 5, 7], [0, 0, 0, 0]])
def test_grouped_linear_gives_each_row_to_its_expert(ends: list[int]) -> None:
    x, weight = torch.randn(ends[-1], 5, dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
    found = grouped_linear(x, weight, torch.tensor(ends, dtype=torch.int32))
    expert_of_row = [next(e for e, end in enumerate(ends) if row < end) for row in range(ends[-1])]
    expected = [weight[expert] @ x[row] for row, expert in enumerate(expert_of_row)]
    assert found.shape == (ends[-1], 3)
    if expected:
        torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-14)
