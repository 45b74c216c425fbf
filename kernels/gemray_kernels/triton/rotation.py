"""Parts of kernels that norm and rotate one head, rounded where separate operations round.

Kernels that rotate are compiled without fused multiply-add: in bfloat16 the compiler would make one of a rounded
product and its sum, and leave a rounding out.

Shape legend: T rows, D head dim, H = D / 2 rotating pairs, G heads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def load_halves(x_D, d_H, inside_H, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of one head, float32; dims m and m + D / 2 rotate together."""
    first_H = tl.load(x_D + d_H, mask=inside_H, other=0.0).to(tl.float32)
    second_H = tl.load(x_D + HEAD_DIM // 2 + d_H, mask=inside_H, other=0.0).to(tl.float32)
    return first_H, second_H


@triton.jit  # type: ignore[untyped-decorator]
def inverse_rms(first_GH, second_GH, eps, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 over the root of each head's mean square, [G, 1]."""
    squares_GH = first_GH * first_GH + second_GH * second_GH
    return 1.0 / tl.sqrt_rn(tl.sum(squares_GH, axis=1, keep_dims=True) / HEAD_DIM + eps)


@triton.jit
def rotate(first_H, second_H, cos1_H, cos2_H, sin1_H, sin2_H, dtype):  # type: ignore[no-untyped-def]
    """Each product and each sum is rounded to `dtype`, as separate operations round."""
    along1_H = (first_H * cos1_H).to(dtype).to(tl.float32)
    across1_H = (-second_H * sin1_H).to(dtype).to(tl.float32)
    along2_H = (second_H * cos2_H).to(dtype).to(tl.float32)
    across2_H = (first_H * sin2_H).to(dtype).to(tl.float32)
    return (along1_H + across1_H).to(dtype), (along2_H + across2_H).to(dtype)
