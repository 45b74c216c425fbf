"""Products with packed weights: unpack, scale, multiply. Exact on every device, and no faster than plain weights.

Shape legend: T rows, R rows sorted by expert, I inputs, O outputs, W words of codes a row, G groups, E experts,
K experts a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from typing_extensions import override

from gemray_kernels.packed_product import PackedExpertProducts, PackedProduct
from gemray_kernels.packed_weight import Code, CodeName, PackedWeight, Tiling
from gemray_kernels.precision import wide_linear
from gemray_kernels.reference.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.reference.experts import gated_by_expert, weighted_sum
from gemray_kernels.reference.grouped_linear import grouped_linear
from gemray_kernels.reference.linear import gelu_of_total_and_mul


def dequantized(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The numbers of a packed weight [..., O, I], computed in float32 and rounded once to `dtype`."""
    skipped = weight.first % weight.code.per_word
    codes_OI = _UNPACK[weight.code.name](weight.codes_OW)[..., skipped : skipped + weight.num_in]
    return (codes_OI * _scales(weight)).to(dtype)


def packed_linear(x_TI: Tensor, weight: PackedWeight) -> Tensor:
    """``x · weightᵀ`` [T, O]."""
    return torch.nn.functional.linear(x_TI, dequantized(weight, x_TI.dtype))


def wide_packed_linear(x_TI: Tensor, weight: PackedWeight) -> Tensor:
    """``x · weightᵀ`` [T, O] in the compute dtype, unrounded."""
    return wide_linear(x_TI, dequantized(weight, x_TI.dtype))


def no_tiling(
    code: Code, group: int, scale_dtype: torch.dtype, first: int, num_in: int, dtype: torch.dtype
) -> Tiling | None:
    """None: the reference reads weights as they lie on disk."""
    return None


class ReferenceProduct(PackedProduct):
    """Products with the unpacked numbers of a weight."""

    def __init__(self, weight: PackedWeight) -> None:
        """Products with `weight`, which is read at each of them."""
        self._weight = weight

    @override
    def linear(self, x_TI: Tensor) -> Tensor:
        return packed_linear(x_TI, self._weight)

    @override
    def summands(self, x_TI: Tensor, first: int = 0) -> Tensor:
        return packed_linear(x_TI, self._weight.rows(first)).unsqueeze(0)

    @override
    def wide_summands(self, x_TI: Tensor) -> Tensor:
        return wide_packed_linear(x_TI, self._weight).unsqueeze(0)

    @override
    def gelu(self, x_TI: Tensor) -> Tensor:
        return gelu_tanh_and_mul(self.linear(x_TI))

    @override
    def silu(self, x_TI: Tensor) -> Tensor:
        return silu_and_mul(self.linear(x_TI))

    @override
    def gated_projection(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        return self.summands(gelu_of_total_and_mul(summands_STI, factor_TI))


class ReferenceExperts(PackedExpertProducts):
    """Experts with unpacked numbers."""

    def __init__(self, gate_up: PackedWeight, down: PackedWeight) -> None:
        """Experts of these weights, which are read at each product."""
        self._gate_up = gate_up
        self._down = down

    @override
    def outputs(self, x_TH: Tensor, experts_TK: Tensor) -> Tensor:
        return packed_expert_outputs(x_TH, experts_TK, self._gate_up, self._down)

    @override
    def weighted_sum(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        return packed_gated_experts(x_TH, weights_TK, experts_TK, self._gate_up, self._down)


def packed_expert_outputs(x_TH: Tensor, experts_TK: Tensor, gate_up: PackedWeight, down: PackedWeight) -> Tensor:
    """``down(gelu_tanh(gate(x)) · up(x))`` [T, K, H] of each row's experts.

    Args:
        x_TH: the experts' input.
        experts_TK: int64, K different ones a row.
        gate_up: of every expert, gate halves above up halves.
        down: of every expert, the second layer.
    """
    return gated_by_expert(
        x_TH,
        experts_TK,
        gate_up.num_experts,
        lambda x_RH, row_ends_E: _grouped(x_RH, gate_up, row_ends_E),
        lambda x_RI, row_ends_E: _grouped(x_RI, down, row_ends_E),
    )


def packed_gated_experts(
    x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: PackedWeight, down: PackedWeight
) -> Tensor:
    """Sum [T, H] of each row's experts by their weights, in the compute dtype."""
    outputs_TKH = packed_expert_outputs(x_TH, experts_TK, gate_up, down)
    return weighted_sum(outputs_TKH, weights_TK, x_TH.dtype)


def _grouped(x_RI: Tensor, weight: PackedWeight, row_ends_E: Tensor) -> Tensor:
    if x_RI.is_cuda:  # without a look at the counts, which would make the host wait
        return grouped_linear(x_RI, dequantized(weight, x_RI.dtype), row_ends_E)
    out_RO = x_RI.new_empty(x_RI.shape[0], weight.num_out)
    start = 0
    for expert, end in enumerate(row_ends_E.tolist()):
        if end > start:
            out_RO[start:end] = packed_linear(x_RI[start:end], weight.expert(expert))
        start = end
    return out_RO


def _scales(weight: PackedWeight) -> Tensor:
    """The scale of each number, float32 [..., O, I], or [..., O, 1] where a row has one."""
    scale_OG = weight.scale_OG.float()
    if weight.row_scale_O is not None:
        row_scale_O1 = weight.row_scale_O.unsqueeze(-1)
        scale_OG = scale_OG / row_scale_O1 if weight.row_scale_divides else scale_OG * row_scale_O1
    if scale_OG.shape[-1] == 1:
        return scale_OG
    places_I = torch.arange(weight.first, weight.first + weight.num_in, device=scale_OG.device)
    return scale_OG[..., places_I // weight.group - weight.first // weight.group]


def _nibbles(codes_OW: Tensor) -> Tensor:
    return _bits(codes_OW, 4, 8) - 8.0


def _bytes(codes_OW: Tensor) -> Tensor:
    return codes_OW.float() if codes_OW.dtype == torch.int8 else _bits(codes_OW, 8, 4) - 128.0


def _bits(words_OW: Tensor, width: int, per_word: int) -> Tensor:
    """Unsigned numbers of `width` bits, float32 [..., O, W · per_word], lowest bits first."""
    shifts = torch.arange(0, width * per_word, width, dtype=words_OW.dtype, device=words_OW.device)
    return ((words_OW.unsqueeze(-1) >> shifts) & ((1 << width) - 1)).flatten(-2).float()


def _e2m1(codes_OW: Tensor) -> Tensor:
    """A sign, two bits of exponent, one of mantissa, without a table: copying one to a GPU is nothing to capture."""
    codes_OI = torch.stack([codes_OW & 15, codes_OW >> 4], dim=-1).flatten(-2).to(torch.int32)
    exponent_OI, mantissa_OI = codes_OI >> 1 & 3, codes_OI & 1
    halves_OI = torch.where(exponent_OI > 0, (2 + mantissa_OI) << (exponent_OI - 1).clamp(min=0), mantissa_OI)
    size_OI = halves_OI.float() / 2
    return torch.where(codes_OI > 7, -size_OI, size_OI)


_UNPACK: Mapping[CodeName, Callable[[Tensor], Tensor]] = {
    "int4": _nibbles,
    "int8": _bytes,
    "fp8": Tensor.float,
    "nvfp4": _e2m1,
}
