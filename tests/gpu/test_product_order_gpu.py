"""Kernels of a layer that start while others run read what those wrote: results are those of kernels one at a time."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from gemray_kernels.numerics import NUM_SHARDS
from gemray_kernels.reference.layer_norms import Norm
from support.kernels.packed_cases import FORMATS, random_packed

pytestmark = pytest.mark.gpu

HIDDEN, WIDTH, LAYERS = 5376, 21504, 6
FORMS = ("bf16", "bf16 exact", "int4 group 32", "nvfp4", "fp8 channel")


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("form", FORMS)
def test_layers_one_behind_the_other_have_the_bits_of_kernels_one_at_a_time(form: str, rows: int) -> None:
    from gemray_kernels.triton import early_start, exact_products, linear_choice
    from gemray_kernels.triton.layer_norms import add_then_norms
    from gemray_kernels.triton.linear_tiles import MOST_AT_ONCE
    from gemray_kernels.triton.packed_products import packed_product

    random = torch.Generator("cuda").manual_seed(rows)

    def numbers(*shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=random, device="cuda") * gain).bfloat16()

    def products(num_out: int, num_in: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """A product whose parts are added up later, and a gated one."""
        if form == "bf16":
            weight_OI = numbers(num_out, num_in, gain=num_in**-0.5)
            return (
                lambda x_TI: linear_choice.summands(x_TI, weight_OI),
                lambda x_TI: linear_choice.gelu_linear(x_TI, weight_OI),
            )
        if form == "bf16 exact":
            weight_OI = numbers(num_out, num_in, gain=num_in**-0.5)
            return (
                lambda x_TI: exact_products.summands(x_TI, weight_OI, NUM_SHARDS),
                lambda x_TI: exact_products.gelu_linear(x_TI, weight_OI, 1),
            )
        product = packed_product(random_packed(FORMATS[form], num_out, num_in, device="cuda"))
        return product.summands, product.gelu

    square, (_, gelu), (down, _) = (
        products(HIDDEN, HIDDEN)[0],
        products(2 * WIDTH, HIDDEN),
        products(HIDDEN, WIDTH),
    )
    at_once = form == "bf16" and rows <= MOST_AT_ONCE  # as they are served
    norm, stream_TH = Norm(numbers(HIDDEN), 1e-6), numbers(rows, HIDDEN)

    def layers(after: Callable[[], None]) -> Tensor:
        x_TH = normed_TH = stream_TH
        for _ in range(LAYERS):
            for product in (square, lambda x_TI: down(gelu(x_TI))):
                summands_STH = product(normed_TH)
                after()
                x_TH, normed_TH = add_then_norms(x_TH, summands_STH, norm, None, [norm], lets_at_once=at_once)
                after()
        return torch.stack([x_TH, normed_TH])

    with mock.patch.object(early_start, "_capability", return_value=(0, 0)):
        expected = layers(torch.cuda.synchronize)
    assert expected.isfinite().all()
    assert torch.equal(layers(lambda: None), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers(lambda: None)
    for _ in range(5):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)
