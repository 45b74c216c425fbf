"""Norms that load their weights before they wait: results are those of kernels one at a time, a row's those alone."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference.layer_norms import Norm

pytestmark = pytest.mark.gpu

LAYERS = 4


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("width", [1536, 2560, 2816, 5376])
def test_norms_behind_products_have_the_bits_of_kernels_one_at_a_time(width: int, rows: int) -> None:
    from gemray_kernels.triton import early_start, linear_choice
    from gemray_kernels.triton.layer_norms import add_experts_then_norms, add_then_norms

    random = torch.Generator("cuda").manual_seed(width + rows)

    def numbers(*shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=random, device="cuda") * gain).bfloat16()

    square, scale, stream_TD = numbers(width, width, gain=width**-0.5), numbers(1), numbers(rows, width)
    norms = [Norm(numbers(width), 1e-6) for _ in range(6)]
    mixing_TK = torch.rand(rows, 4, generator=random, device="cuda")

    def layers(stream_TD: Tensor, after: Callable[[], None]) -> Tensor:
        x_TD = input_TD = stream_TD
        for _ in range(LAYERS):
            parts_STD = linear_choice.summands(input_TD, square)
            after()
            x_TD, first_TD, second_TD, third_TD = add_then_norms(x_TD, parts_STD, norms[0], None, norms[1:4])
            after()
            routed_TKD = torch.stack([first_TD, second_TD, third_TD, x_TD], dim=1)
            parts_STD = linear_choice.summands(first_TD, square)
            after()
            x_TD, input_TD = add_experts_then_norms(
                x_TD, parts_STD, norms[1], routed_TKD, mixing_TK[: len(x_TD)], norms[2], norms[3], scale, norms[4:5]
            )
            after()
            parts_STD = linear_choice.summands(input_TD, square)
            after()
            x_TD, input_TD = add_then_norms(x_TD, parts_STD, norms[5], scale, norms[:1])
            after()
        return torch.stack([x_TD, input_TD])

    with mock.patch.object(early_start, "_capability", return_value=(0, 0)):
        expected = layers(stream_TD, torch.cuda.synchronize)
    assert expected.isfinite().all()
    assert torch.equal(layers(stream_TD, lambda: None), expected)
    mixing_TK = mixing_TK[-1:]
    assert torch.equal(layers(stream_TD[-1:], lambda: None), expected[:, -1:])
