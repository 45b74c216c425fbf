"""A tile product that also holds under Triton's interpreter, which multiplies the bit patterns of 16-bit floats."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, acc):  # type: ignore[no-untyped-def]
    """``acc + a · b`` with float32 sums; float32 operands are not rounded to tf32.

    A loop in which sums begin anew must take its number of trips from the launch: where they are known and few, ptxas
    (12.8 and 12.9) may unroll the loop whole, and then takes the last trip's products for those of all.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
