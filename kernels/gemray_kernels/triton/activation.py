"""The gated activations, each in one Triton kernel that rounds where `gemray_kernels.reference.activation` rounds.

Shape legend: T rows, I width of the gate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.layout import require_rows

BLOCK = 1024


def gelu_tanh_and_mul(gate_up_T2I: Tensor) -> Tensor:
    """As `gemray_kernels.reference.activation.gelu_tanh_and_mul`."""
    return _gated(gate_up_T2I, gelu=True)


def silu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    """As `gemray_kernels.reference.activation.silu_and_mul`."""
    return _gated(gate_up_T2I, gelu=False)


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    gate_up_T2I = gate_up.reshape(-1, gate_up.shape[-1])
    require_rows(gate_up=gate_up_T2I)
    num_rows, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _gated_kernel[(num_rows, triton.cdiv(width, BLOCK))](
            gate_up_T2I, out, width, gate_up_T2I.stride(0), GELU=gelu, BLOCK=BLOCK, num_warps=4
        )
    return out


@triton.jit
def gelu_tanh(x):  # type: ignore[no-untyped-def]
    """``0.5 x (1 + tanh(u))``, as ``x · sigmoid(2 u)``: the same function without the cancellation near 0."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit  # type: ignore[untyped-decorator]
def gated_sums(gate, up, dtype: tl.constexpr, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """``act(gate) · up`` in float32, of float32 sums that are rounded as stored projections and a stored activation."""
    gate = gate.to(dtype).to(tl.float32)
    if GELU:  # noqa: SIM108 - chosen at compile time
        gate = gelu_tanh(gate)
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    return gate.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_kernel(  # type: ignore[no-untyped-def]
    gate_up_T2I, out_TI, width, row_stride, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_T2I + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_T2I + row * row_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    dtype = out_TI.dtype.element_ty
    tl.store(out_TI + row * width + column, gated_sums(gate, up, dtype, GELU).to(dtype), mask=inside)
