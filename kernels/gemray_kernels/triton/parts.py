"""The sum of a product's parts as its readers take it, in the order of `gemray_kernels.reference.layer_norms.total`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def total(at, stride, mask, other, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum in float32 of what lies at `at` and ever `stride` behind it: by the tree where PARTS is a power of two, else
    in order."""
    if PARTS & (PARTS - 1) == 0:
        result = subtree(at, stride, mask, other, PARTS)
    else:
        result = tl.load(at, mask=mask, other=other).to(tl.float32)
        for s in tl.static_range(1, PARTS):
            result += tl.load(at + s * tl.cast(stride, tl.int64), mask=mask, other=other).to(tl.float32)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def subtree(at, stride, mask, other, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum by the tree of PARTS parts, a power of two."""
    if PARTS == 1:
        result = tl.load(at, mask=mask, other=other).to(tl.float32)
    else:
        left = subtree(at, stride, mask, other, PARTS // 2)
        result = left + subtree(at + PARTS // 2 * tl.cast(stride, tl.int64), stride, mask, other, PARTS // 2)
    return result
