"""From words of packed codes to tiles of bfloat16 numbers, two at a time in a register (`gemray_kernels.packed_tiles`).

Every function takes a tile of words [O, C] (or [C, O]) and gives one tile of that shape for each plane. A number is
masked out of its word and is then multiplied once, with its scale where it has one, so that it is rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.triton.dot import INTERPRETED


@triton.jit
def scaled_int4(words, scales):  # type: ignore[no-untyped-def]
    """``(code - 8) · scale · 2^-21``, of four scales in an int64, from each of which ``8 · scale`` is made.

    The two words of a register are neighbours of one output, as products want them: the scales of the first serve both.
    """
    if INTERPRETED:
        return (
            (_bits(words, 0, 15) - 8.0) * (_bfloat16(scales).to(tl.float32) * 2.0**-133),
            (_bits(words, 4, 15) - 8.0) * (_bfloat16(scales >> 16).to(tl.float32) * 2.0**-129),
            (_bits(words, 8, 15) - 8.0) * (_bfloat16(scales >> 32).to(tl.float32) * 2.0**-133),
            (_bits(words, 12, 15) - 8.0) * (_bfloat16(scales >> 48).to(tl.float32) * 2.0**-129),
        )
    # 0x8008 is -8 · 2^-133, 0x8080 is -8 · 2^-129. An instruction takes either half of a register for both numbers, so
    # that a scale needs none of its own.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 code, high, offset, even, odd, first, last, scale;
        .reg .b16 s0, s1, s2, s3;
        mov.b64 {first, last}, $5;
        mov.b32 {s0, s1}, first;
        mov.b32 {s2, s3}, last;
        mov.b32 even, 0x80088008;
        mov.b32 odd, 0x80808080;
        mov.b32 scale, {s0, s0};
        mul.rn.bf16x2 offset, scale, even;
        and.b32 code, $4, 0x000F000F;
        fma.rn.bf16x2 $0, code, scale, offset;
        mov.b32 scale, {s1, s1};
        mul.rn.bf16x2 offset, scale, odd;
        and.b32 code, $4, 0x00F000F0;
        fma.rn.bf16x2 $1, code, scale, offset;
        shr.u32 high, $4, 8;
        mov.b32 scale, {s2, s2};
        mul.rn.bf16x2 offset, scale, even;
        and.b32 code, high, 0x000F000F;
        fma.rn.bf16x2 $2, code, scale, offset;
        mov.b32 scale, {s3, s3};
        mul.rn.bf16x2 offset, scale, odd;
        and.b32 code, high, 0x00F000F0;
        fma.rn.bf16x2 $3, code, scale, offset;
        }
        """,
        "=&r,=&r,=&r,=&r,r,l,l",
        [words, scales],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def plain_int4(words):  # type: ignore[no-untyped-def]
    """``(code - 8) · 2^-21``."""
    if INTERPRETED:
        return (
            (_bits(words, 0, 15) - 8.0) * 2.0**-21,
            (_bits(words, 4, 15) - 8.0) * 2.0**-21,
            (_bits(words, 8, 15) - 8.0) * 2.0**-21,
            (_bits(words, 12, 15) - 8.0) * 2.0**-21,
        )
    # 0x7780 is 2^112, 0x7580 is 2^108, 0xB680 is -8 · 2^-21.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 code, high, offset, even, odd;
        mov.b32 even, 0x77807780;
        mov.b32 odd, 0x75807580;
        mov.b32 offset, 0xB680B680;
        and.b32 code, $4, 0x000F000F;
        fma.rn.bf16x2 $0, code, even, offset;
        and.b32 code, $4, 0x00F000F0;
        fma.rn.bf16x2 $1, code, odd, offset;
        shr.u32 high, $4, 8;
        and.b32 code, high, 0x000F000F;
        fma.rn.bf16x2 $2, code, even, offset;
        and.b32 code, high, 0x00F000F0;
        fma.rn.bf16x2 $3, code, odd, offset;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def scaled_e2m1(words, scales):  # type: ignore[no-untyped-def]
    """``value · scale · 2^-8``, of four scales in an int32 with five bits of exponent each.

    The two words of a register are neighbours of one output, as products want them: the scales of the first serve both.
    """
    if INTERPRETED:
        return (
            _e2m1(_bits(words, 15, 1), _bits(words, 7, 3), _bits(words, 6, 1)) * _scale_of_e2m1(scales),
            _e2m1(_bits(words, 12, 1), _bits(words, 4, 3), _bits(words, 3, 1)) * _scale_of_e2m1(scales >> 8),
            _e2m1(_bits(words, 14, 1), _bits(words, 1, 3), _bits(words, 0, 1)) * _scale_of_e2m1(scales >> 16),
            _e2m1(_bits(words, 13, 1), _bits(words, 10, 3), _bits(words, 9, 1)) * _scale_of_e2m1(scales >> 24),
        )
    # A scale's exponent is 10 too large and then 225 too small for 2^118: 0x7580 is 235 in bfloat16's place. Two scales
    # are made at a time, and each is taken for both numbers of a register.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 value, sign, scale, even, odd, base;
        .reg .b16 s0, s1, s2, s3;
        mov.b32 base, 0x75807580;
        and.b32 even, $5, 0x00FF00FF;
        mad.lo.u32 even, even, 16, base;
        shr.u32 odd, $5, 8;
        and.b32 odd, odd, 0x00FF00FF;
        mad.lo.u32 odd, odd, 16, base;
        mov.b32 {s0, s2}, even;
        mov.b32 {s1, s3}, odd;
        mov.b32 scale, {s0, s0};
        and.b32 value, $4, 0x81C081C0;
        mul.rn.bf16x2 $0, value, scale;
        mov.b32 scale, {s1, s1};
        shl.b32 value, $4, 3;
        and.b32 value, value, 0x81C081C0;
        mul.rn.bf16x2 $1, value, scale;
        mov.b32 scale, {s2, s2};
        shl.b32 sign, $4, 1;
        and.b32 sign, sign, 0x80008000;
        shl.b32 value, $4, 6;
        and.b32 value, value, 0x01C001C0;
        or.b32 value, value, sign;
        mul.rn.bf16x2 $2, value, scale;
        mov.b32 scale, {s3, s3};
        shl.b32 sign, $4, 2;
        and.b32 sign, sign, 0x80008000;
        shr.u32 value, $4, 3;
        and.b32 value, value, 0x01C001C0;
        or.b32 value, value, sign;
        mul.rn.bf16x2 $3, value, scale;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r",
        [words, scales],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def int8(words):  # type: ignore[no-untyped-def]
    """``(code - 128) · 2^-21``."""
    if INTERPRETED:
        return (_bits(words, 0, 255) - 128.0) * 2.0**-21, (_bits(words, 8, 255) - 128.0) * 2.0**-21
    # 0x7780 is 2^112, 0xB880 is -128 · 2^-21.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 code, scale, offset;
        mov.b32 scale, 0x77807780;
        mov.b32 offset, 0xB880B880;
        and.b32 code, $2, 0x00FF00FF;
        fma.rn.bf16x2 $0, code, scale, offset;
        shr.u32 code, $2, 8;
        and.b32 code, code, 0x00FF00FF;
        fma.rn.bf16x2 $1, code, scale, offset;
        }
        """,
        "=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def e4m3(words):  # type: ignore[no-untyped-def]
    """The numbers themselves."""
    if INTERPRETED:
        w0, w1 = masked_e4m3(words)
        return w0 * 2.0**120, w1 * 2.0**120
    # 0x7B80 is 2^120.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 value, other, scale;
        mov.b32 scale, 0x7B807B80;
        and.b32 value, $2, 0x87F087F0;
        mul.rn.bf16x2 $0, value, scale;
        shl.b32 other, $2, 4;
        and.b32 other, other, 0x80F080F0;
        shr.u32 value, $2, 4;
        and.b32 value, value, 0x07000700;
        or.b32 value, value, other;
        mul.rn.bf16x2 $1, value, scale;
        }
        """,
        "=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def masked_e4m3(words):  # type: ignore[no-untyped-def]
    """``value · 2^-120``, in float32 where it is interpreted."""
    if INTERPRETED:
        bits = words.to(tl.int32)
        w0 = ((bits & 0x87F0) << 16).to(tl.float32, bitcast=True)
        w1 = ((((bits << 4) & 0x80F0) | ((bits >> 4) & 0x0700)) << 16).to(tl.float32, bitcast=True)
        return w0, w1
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 value, other;
        and.b32 $0, $2, 0x87F087F0;
        shl.b32 other, $2, 4;
        and.b32 other, other, 0x80F080F0;
        shr.u32 value, $2, 4;
        and.b32 value, value, 0x07000700;
        or.b32 $1, value, other;
        }
        """,
        "=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _bfloat16(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scale_of_e2m1(scales):  # type: ignore[no-untyped-def]
    """``scale · 2^-8``."""
    return _bfloat16((scales & 255) * 16 + (235 << 7)).to(tl.float32) * 2.0**-126


@triton.jit
def _bits(words, place, mask):  # type: ignore[no-untyped-def]
    return ((words.to(tl.int32) >> place) & mask).to(tl.float32)


@triton.jit
def _e2m1(sign, exponent, mantissa):  # type: ignore[no-untyped-def]
    size = tl.where(exponent > 0, (2.0 + mantissa) * tl.exp2(exponent - 2.0), mantissa * 0.5)
    return tl.where(sign > 0, -size, size)
