"""Numbers of packed codes times the parts of their factor, two at a time in a register, rounded once each.

Parts are those of `factor_parts`, in int32 with a part in either half. What `packed_planes` makes of
words is multiplied in the same piece of assembly: Triton may pass what one piece gives another through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.triton.dot import INTERPRETED
from gemray_kernels.triton.packed_planes import (
    int8,
    masked_e2m1,
    masked_e4m3,
    of_runs,
    plain_int4,
    scaled_e2m1,
    scales_of_e2m1,
)


def _text(values: str, planes: int, operands: int, parts: int) -> tl.constexpr:
    """Assembly of `values`, which leaves a register for each plane, and of its products with the parts of a factor.

    Args:
        values: reads words from ``$W`` and, of e2m1, their scales from ``$S``.
        planes: results.
        operands: registers of what it reads; parts follow, of two registers each, which are equal.
        parts: 1 or 2.
    """
    high = planes + operands
    lines = [values.replace("$W", f"${planes}").replace("$S", f"${planes + 1}")]
    for plane in range(planes):
        if parts == 1:
            lines.append(f"mul.rn.bf16x2 ${plane}, p{plane}, ${high};")
        else:
            lines.append(f"mul.rn.bf16x2 rest, p{plane}, ${high + 2};")
            lines.append(f"fma.rn.bf16x2 ${plane}, p{plane}, ${high}, rest;")
    return tl.constexpr("{\n.reg .b32 p<4>, rest;\n" + "\n".join(lines) + "\n}")


_MASKED_E4M3 = """
    .reg .b32 left, right;
    and.b32 p0, $W, 0x87F087F0;
    shl.b32 left, $W, 4;
    shr.u32 right, $W, 4;
    lop3.b32 p1, left, right, 0x87F087F0, 0x28;
"""
"""As of `packed_planes.masked_e4m3`."""
_INT8 = """
    .reg .b32 code, scale, offset;
    mov.b32 scale, 0x77807780;
    mov.b32 offset, 0xB880B880;
    and.b32 code, $W, 0x00FF00FF;
    fma.rn.bf16x2 p0, code, scale, offset;
    shr.u32 code, $W, 8;
    and.b32 code, code, 0x00FF00FF;
    fma.rn.bf16x2 p1, code, scale, offset;
"""
"""As of `packed_planes.int8`."""
_PLAIN_INT4 = """
    .reg .b32 code, shifted, offset, even, odd;
    mov.b32 even, 0x77807780;
    mov.b32 odd, 0x75807580;
    mov.b32 offset, 0xB680B680;
    and.b32 code, $W, 0x000F000F;
    fma.rn.bf16x2 p0, code, even, offset;
    and.b32 code, $W, 0x00F000F0;
    fma.rn.bf16x2 p1, code, odd, offset;
    shr.u32 shifted, $W, 8;
    and.b32 code, shifted, 0x000F000F;
    fma.rn.bf16x2 p2, code, even, offset;
    and.b32 code, shifted, 0x00F000F0;
    fma.rn.bf16x2 p3, code, odd, offset;
"""
"""As of `packed_planes.plain_int4`."""
_SCALED_E2M1 = """
    .reg .b32 left, other, scale, even, odd;
    .reg .b16 s0, s1, s2, s3;
    lop3.b32 even, $S, 0x0FF00FF0, 0x70007000, 0xEA;
    prmt.b32 odd, $S, 0, 0x2301;
    lop3.b32 odd, odd, 0x0FF00FF0, 0x70007000, 0xEA;
    mov.b32 {s0, s2}, even;
    mov.b32 {s1, s3}, odd;
    mov.b32 scale, {s0, s0};
    and.b32 p0, $W, 0x81C081C0;
    mul.rn.bf16x2 p0, p0, scale;
    mov.b32 scale, {s1, s1};
    shl.b32 left, $W, 4;
    and.b32 p1, left, 0x81C081C0;
    mul.rn.bf16x2 p1, p1, scale;
    mov.b32 scale, {s2, s2};
    shl.b32 left, $W, 6;
    shf.l.wrap.b32 other, $W, $W, 26;
    lop3.b32 p2, left, other, 0x81C081C0, 0x28;
    mul.rn.bf16x2 p2, p2, scale;
    mov.b32 scale, {s3, s3};
    shr.u32 other, $W, 4;
    lop3.b32 p3, left, other, 0x81C081C0, 0x28;
    mul.rn.bf16x2 p3, p3, scale;
"""
"""As of `packed_planes.scaled_e2m1`."""
_E2M1_IN_SHORT = tl.constexpr("""
    {
    .reg .b32 value, left, other, even, odd, rest, evens, odds;
    .reg .b16 h0, h1, h2, h3, l0, l1, l2, l3;
    .reg .b32 s0, s1, s2, s3, r0, r1, r2, r3;
    lop3.b32 even, $5, 0x0FF00FF0, 0x70007000, 0xEA;
    prmt.b32 odd, $5, 0, 0x2301;
    lop3.b32 odd, odd, 0x0FF00FF0, 0x70007000, 0xEA;
    mul.rn.bf16x2 evens, even, $7;
    mul.rn.bf16x2 odds, odd, $7;
    mov.b32 {h0, h2}, evens;
    mov.b32 {h1, h3}, odds;
    mul.rn.bf16x2 evens, even, $9;
    mul.rn.bf16x2 odds, odd, $9;
    mov.b32 {l0, l2}, evens;
    mov.b32 {l1, l3}, odds;
    mov.b32 s0, {h0, h0};
    mov.b32 s1, {h1, h1};
    mov.b32 s2, {h2, h2};
    mov.b32 s3, {h3, h3};
    mov.b32 r0, {l0, l0};
    mov.b32 r1, {l1, l1};
    mov.b32 r2, {l2, l2};
    mov.b32 r3, {l3, l3};
    and.b32 value, $4, 0x81C081C0;
    mul.rn.bf16x2 rest, value, r0;
    fma.rn.bf16x2 $0, value, s0, rest;
    shl.b32 left, $4, 4;
    and.b32 value, left, 0x81C081C0;
    mul.rn.bf16x2 rest, value, r1;
    fma.rn.bf16x2 $1, value, s1, rest;
    shl.b32 left, $4, 6;
    shf.l.wrap.b32 other, $4, $4, 26;
    lop3.b32 value, left, other, 0x81C081C0, 0x28;
    mul.rn.bf16x2 rest, value, r2;
    fma.rn.bf16x2 $2, value, s2, rest;
    shr.u32 other, $4, 4;
    lop3.b32 value, left, other, 0x81C081C0, 0x28;
    mul.rn.bf16x2 rest, value, r3;
    fma.rn.bf16x2 $3, value, s3, rest;
    }
    """)
"""Scales are multiplied with both parts, one for a thread's four numbers, and numbers with both products: two
instructions for two numbers, where a product with the scale and products with both parts are three."""

_E4M3_IN_ONE = _text(_MASKED_E4M3, 2, 1, 1)
_E4M3_IN_TWO = _text(_MASKED_E4M3, 2, 1, 2)
_INT8_IN_TWO = _text(_INT8, 2, 1, 2)
_INT4_IN_ONE = _text(_PLAIN_INT4, 4, 1, 1)
_INT4_IN_TWO = _text(_PLAIN_INT4, 4, 1, 2)
_E2M1_IN_ONE = _text(_SCALED_E2M1, 4, 3, 1)
_E2M1_IN_TWO = _text(_SCALED_E2M1, 4, 3, 2)


@triton.jit  # type: ignore[untyped-decorator]
def e4m3_in_parts(words, high, low, PARTS: tl.constexpr, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``value · factor``, of parts that are 2^120 as large."""
    if INTERPRETED:
        w0, w1 = masked_e4m3(words, AXIS)
        w0 = _times_parts(w0, high, low, PARTS)
        w1 = _times_parts(w1, high, low, PARTS)
    else:
        w0, w1 = tl.inline_asm_elementwise(
            _E4M3_IN_ONE if PARTS == 1 else _E4M3_IN_TWO,
            "=&r,=&r,r,r,r,r,r",
            [words, high, low],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return w0, w1


@triton.jit  # type: ignore[untyped-decorator]
def int8_in_parts(words, high, low, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(code - 128) · factor``; of one part, that is ``factor · 2^91``, 2^-21 of it."""
    if INTERPRETED:
        w0, w1 = int8(words)
        if PARTS == 1:
            w0 *= _part(high) * 2.0**-112
            w1 *= _part(high) * 2.0**-112
        else:
            w0 = _times_parts(w0, high, low, PARTS)
            w1 = _times_parts(w1, high, low, PARTS)
    elif PARTS == 1:
        # 0x8080 is -128 · 2^-133.
        w0, w1 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 code, offset;
            mov.b32 offset, 0x80808080;
            mul.rn.bf16x2 offset, offset, $3;
            and.b32 code, $2, 0x00FF00FF;
            fma.rn.bf16x2 $0, code, $3, offset;
            shr.u32 code, $2, 8;
            and.b32 code, code, 0x00FF00FF;
            fma.rn.bf16x2 $1, code, $3, offset;
            }
            """,
            "=&r,=&r,r,r,r",
            [words, high],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        w0, w1 = tl.inline_asm_elementwise(
            _INT8_IN_TWO,
            "=&r,=&r,r,r,r,r,r",
            [words, high, low],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return w0, w1


@triton.jit  # type: ignore[untyped-decorator]
def int4_in_parts(words, high, low, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(code - 8) · factor · 2^-21``."""
    if INTERPRETED:
        w0, w1, w2, w3 = plain_int4(words)
        w0 = _times_parts(w0, high, low, PARTS)
        w1 = _times_parts(w1, high, low, PARTS)
        w2 = _times_parts(w2, high, low, PARTS)
        w3 = _times_parts(w3, high, low, PARTS)
    else:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _INT4_IN_ONE if PARTS == 1 else _INT4_IN_TWO,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, high, low],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def e2m1_in_parts(words, scales, high, low, PARTS: tl.constexpr, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``value · scale · factor · 2^-8``, of scales as of `scaled_e2m1`; PARTS may be `factor_parts.SHORT`, too."""
    if scales.shape[AXIS] == 2:
        scales = of_runs(scales, words.shape[AXIS] // 2, AXIS)
    if INTERPRETED and PARTS == 3:
        v0, v1, v2, v3 = masked_e2m1(words, AXIS)
        s0, s1, s2, s3 = scales_of_e2m1(scales)
        w0 = _times_scale_in_parts(v0, s0, high, low)
        w1 = _times_scale_in_parts(v1, s1, high, low)
        w2 = _times_scale_in_parts(v2, s2, high, low)
        w3 = _times_scale_in_parts(v3, s3, high, low)
    elif INTERPRETED:
        w0, w1, w2, w3 = scaled_e2m1(words, scales, AXIS)
        w0 = _times_parts(w0, high, low, PARTS)
        w1 = _times_parts(w1, high, low, PARTS)
        w2 = _times_parts(w2, high, low, PARTS)
        w3 = _times_parts(w3, high, low, PARTS)
    else:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _E2M1_IN_ONE if PARTS == 1 else _E2M1_IN_TWO if PARTS == 2 else _E2M1_IN_SHORT,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
            [words, scales, high, low],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return w0, w1, w2, w3


@triton.jit  # type: ignore[untyped-decorator]
def _times_parts(plane, high, low, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    product = plane * _part(high)
    if PARTS == 2:
        product += plane * _part(low)
    return product.to(tl.bfloat16)


@triton.jit
def _times_scale_in_parts(plane, scale, high, low):  # type: ignore[no-untyped-def]
    rest = plane * (scale * _part(low)).to(tl.bfloat16).to(tl.float32)
    return (plane * (scale * _part(high)) + rest.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _part(repeated):  # type: ignore[no-untyped-def]
    return (repeated << 16).to(tl.float32, bitcast=True)
