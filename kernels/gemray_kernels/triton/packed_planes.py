"""From words of packed codes to tiles of bfloat16 numbers, two at a time in a register (`gemray_kernels.packed_tiles`).

Every function takes a tile of words [O, C] (or [C, O]) and gives one tile of that shape for each plane. A number is
masked out of its word and is then multiplied once, with its scale where it has one, so that it is rounded once; where
its scale goes into sums of numbers, it is not multiplied at all. AXIS is that of the words of an output: the
interpreter, whose tiles have no registers, pairs its words by it.
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


@triton.jit  # type: ignore[untyped-decorator]
def scaled_e2m1(words, scales, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``value · scale · 2^-8``, of four scales in an int32, which hold eight bits of ``scale · 2^118`` each.

    The two words of a register are neighbours of one output, as products want them: the scales of the first serve both.
    `scales` is as long as `words` along AXIS, or has one or two of the runs of words there.
    """
    if scales.shape[AXIS] == 2:
        scales = of_runs(scales, words.shape[AXIS] // 2, AXIS)
    if INTERPRETED:
        v0, v1, v2, v3 = masked_e2m1(words, AXIS)
        s0, s1, s2, s3 = scales_of_e2m1(scales)
        return v0 * s0, v1 * s1, v2 * s2, v3 * s3
    # Bits that masks leave are those of `gemray_kernels.packed_words`. Of lop3's tables 0xEA is (a & b) | c and 0x28 is
    # (a ^ b) & c. Two scales are made at a time, and each is taken for both numbers of a register.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 value, left, other, scale, even, odd;
        .reg .b16 s0, s1, s2, s3;
        lop3.b32 even, $5, 0x0FF00FF0, 0x70007000, 0xEA;
        prmt.b32 odd, $5, 0, 0x2301;
        lop3.b32 odd, odd, 0x0FF00FF0, 0x70007000, 0xEA;
        mov.b32 {s0, s2}, even;
        mov.b32 {s1, s3}, odd;
        mov.b32 scale, {s0, s0};
        and.b32 value, $4, 0x81C081C0;
        mul.rn.bf16x2 $0, value, scale;
        mov.b32 scale, {s1, s1};
        shl.b32 left, $4, 4;
        and.b32 value, left, 0x81C081C0;
        mul.rn.bf16x2 $1, value, scale;
        mov.b32 scale, {s2, s2};
        shl.b32 left, $4, 6;
        shf.l.wrap.b32 other, $4, $4, 26;
        lop3.b32 value, left, other, 0x81C081C0, 0x28;
        mul.rn.bf16x2 $2, value, scale;
        mov.b32 scale, {s3, s3};
        shr.u32 other, $4, 4;
        lop3.b32 value, left, other, 0x81C081C0, 0x28;
        mul.rn.bf16x2 $3, value, scale;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r",
        [words, scales],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit  # type: ignore[untyped-decorator]
def masked_e2m1(words, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``value · 2^-126`` in float32, where it is interpreted."""
    register = _registers(words, AXIS)
    left = register << 6
    return (
        _numbers(register & 0x81C081C0, AXIS),
        _numbers(register << 4 & 0x81C081C0, AXIS),
        _numbers((left ^ register >> 6 ^ register << 26) & 0x81C081C0, AXIS),
        _numbers((left ^ register >> 4) & 0x81C081C0, AXIS),
    )


@triton.jit
def scales_of_e2m1(scales):  # type: ignore[no-untyped-def]
    """``scale · 2^118`` of each plane in float32, where it is interpreted."""
    return (
        _scale_of_e2m1(scales),
        _scale_of_e2m1(_bytes_changed(scales)),
        _scale_of_e2m1(scales >> 16),
        _scale_of_e2m1(_bytes_changed(scales >> 16)),
    )


@triton.jit
def unscaled_int4(words):  # type: ignore[no-untyped-def]
    """``code · 2^-133``, and ``code · 2^-129`` in every second plane: as they are masked out of their words."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 high;
        and.b32 $0, $4, 0x000F000F;
        and.b32 $1, $4, 0x00F000F0;
        shr.u32 high, $4, 8;
        and.b32 $2, high, 0x000F000F;
        and.b32 $3, high, 0x00F000F0;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def unscaled_e2m1(words):  # type: ignore[no-untyped-def]
    """``value · 2^-126``, as they are masked out of their words: `scaled_e2m1` says how."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 left, other;
        and.b32 $0, $4, 0x81C081C0;
        shl.b32 left, $4, 4;
        and.b32 $1, left, 0x81C081C0;
        shl.b32 left, $4, 6;
        shf.l.wrap.b32 other, $4, $4, 26;
        lop3.b32 $2, left, other, 0x81C081C0, 0x28;
        shr.u32 other, $4, 4;
        lop3.b32 $3, left, other, 0x81C081C0, 0x28;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [words],
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


@triton.jit  # type: ignore[untyped-decorator]
def e4m3(words, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers themselves."""
    if INTERPRETED:
        w0, w1 = masked_e4m3(words, AXIS)
        return w0 * 2.0**120, w1 * 2.0**120
    # 0x7B80 is 2^120.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 value, left, right, scale;
        mov.b32 scale, 0x7B807B80;
        and.b32 value, $2, 0x87F087F0;
        mul.rn.bf16x2 $0, value, scale;
        shl.b32 left, $2, 4;
        shr.u32 right, $2, 4;
        lop3.b32 value, left, right, 0x87F087F0, 0x28;
        mul.rn.bf16x2 $1, value, scale;
        }
        """,
        "=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit  # type: ignore[untyped-decorator]
def masked_e4m3(words, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``value · 2^-120``, in float32 where it is interpreted."""
    if INTERPRETED:
        register = _registers(words, AXIS)
        w1 = (register << 4 ^ register >> 4) & 0x87F087F0
        return _numbers(register & 0x87F087F0, AXIS), _numbers(w1, AXIS)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 left, right;
        and.b32 $0, $2, 0x87F087F0;
        shl.b32 left, $2, 4;
        shr.u32 right, $2, 4;
        lop3.b32 $1, left, right, 0x87F087F0, 0x28;
        }
        """,
        "=&r,=&r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _registers(words, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The registers of neighbouring words along an axis, int64 [..., C / 2], with that axis last."""
    if AXIS == 0:
        words = tl.trans(words)
    low, high = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 2, 2)))
    return (low.to(tl.int64) & 0xFFFF) | (high.to(tl.int64) & 0xFFFF) << 16


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(registers, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers of bfloat16 in either half of registers, as float32, in the words' order."""
    low = (registers << 16).to(tl.int32).to(tl.float32, bitcast=True)
    high = (registers & 0xFFFF0000).to(tl.int32).to(tl.float32, bitcast=True)
    numbers = tl.reshape(tl.join(low, high), (registers.shape[0], 2 * registers.shape[1]))
    if AXIS == 0:
        numbers = tl.trans(numbers)
    return numbers


@triton.jit
def _bfloat16(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def of_runs(scales, times: tl.constexpr, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each of two scales for a run of words; no number moves between threads."""
    others: tl.constexpr = scales.shape[1 - AXIS]
    if AXIS:
        result = tl.reshape(tl.broadcast_to(scales[:, :, None], (others, 2, times)), (others, 2 * times))
    else:
        result = tl.reshape(tl.broadcast_to(scales[:, None, :], (2, times, others)), (2 * times, others))
    return result


@triton.jit
def _bytes_changed(scales):  # type: ignore[no-untyped-def]
    return (scales >> 8 & 255) | scales << 8


@triton.jit
def _scale_of_e2m1(scales):  # type: ignore[no-untyped-def]
    """``scale · 2^118`` of the lower half."""
    return _bfloat16(scales & 0x0FF0 | 0x7000).to(tl.float32)


@triton.jit
def _bits(words, place, mask):  # type: ignore[no-untyped-def]
    return ((words.to(tl.int32) >> place) & mask).to(tl.float32)
