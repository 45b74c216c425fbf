"""What a weight in the model's own dtype is multiplied by: the kernels of either numerics under one signature.

Shape legend: T rows, I inputs, O outputs (the local ones where the layer is sharded), S summands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gemray_kernels.product_starts import NOT_AHEAD, ProductStarts
from gemray_kernels.table import Kernels


@dataclass(frozen=True, kw_only=True)
class PlainProducts:
    """Products of rows x_TI and a weight_OI; results are those of `gemray_kernels.reference.linear`."""

    linear: Callable[[Tensor, Tensor], Tensor]
    summands: Callable[[Tensor, Tensor], Tensor]
    wide_summands: Callable[[Tensor, Tensor], Tensor]
    gelu_linear: Callable[[Tensor, Tensor], Tensor]
    silu_linear: Callable[[Tensor, Tensor], Tensor]
    gated_projection: Callable[[Tensor, Tensor, Tensor], Tensor]
    starts: ProductStarts


def plain_products(kernels: Kernels, leaves: int) -> PlainProducts:
    """Choose the products of one weight.

    Args:
        kernels: of the model's numerics.
        leaves: leaves of the weight's inputs on this rank (`gemray_kernels.numerics`), which exact numerics alone have.
    """
    exact = kernels.exact
    if exact is None:
        return PlainProducts(
            linear=kernels.linear,
            summands=kernels.summands,
            wide_summands=kernels.wide_summands,
            gelu_linear=kernels.gelu_linear,
            silu_linear=kernels.silu_linear,
            gated_projection=kernels.gated_projection,
            starts=kernels.starts,
        )
    return PlainProducts(
        linear=lambda x_TI, weight_OI: exact.linear(x_TI, weight_OI, leaves),
        summands=lambda x_TI, weight_OI: exact.summands(x_TI, weight_OI, leaves),
        wide_summands=lambda x_TI, weight_OI: exact.wide_summands(x_TI, weight_OI, leaves),
        gelu_linear=lambda x_TI, weight_OI: exact.gelu_linear(x_TI, weight_OI, leaves),
        silu_linear=lambda x_TI, weight_OI: exact.silu_linear(x_TI, weight_OI, leaves),
        gated_projection=lambda summands_STI, factor_TI, weight_OI: exact.gated_projection(
            summands_STI, factor_TI, weight_OI, leaves
        ),
        starts=NOT_AHEAD,
    )
