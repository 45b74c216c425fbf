"""Numbers of one half of a step's inputs, as the tensor cores take them from registers (`packed_prompts`).

A step is one unit of words or two small ones of NVFP4. Its halves are 64 inputs each: half the planes of a unit, or all
four of a small one.

Shape legend: O outputs, B units, C words of a unit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemray_kernels.triton.exact_packed_numbers import e2m1_in_parts, e4m3_in_parts, int4_in_parts, int8_in_parts
from gemray_kernels.triton.exact_packed_unit import repeated
from gemray_kernels.triton.packed_planes import e4m3, int8, masked_e4m3, plain_int4, scaled_e2m1, scaled_int4

MASKED_E4M3 = gl.constexpr(2.0**120)
"""What sums of products with e4m3's numbers are multiplied with: where units have no scales, numbers stay as they are
masked out of their words, 2^-120 of themselves. Tensor cores multiply and add subnormal numbers as any others; what is
lost is what is below 2^-149, or 2^-29 before they were made smaller."""


@gluon.jit  # type: ignore[untyped-decorator]
def words_of_step(words_tiles, stage, GROUP: gl.constexpr, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Words [O, C] that each half of a step is made of."""
    first = (stage * SHAPE.groups + GROUP) * SHAPE.units
    low = words_tiles.index(first).reshape((SHAPE.outputs, SHAPE.words)).load(LAYOUT)
    high = low
    if SHAPE.units == 2:
        high = words_tiles.index(first + 1).reshape((SHAPE.outputs, SHAPE.words)).load(LAYOUT)
    return low, high


@gluon.jit  # type: ignore[untyped-decorator]
def scales_of_step(weight, step, o_O, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scales [O] of each half of a step; names where there are none. A unit behind the last one has that one's."""
    scale_BO, _, last_unit, scale_stride = weight
    low = o_O
    high = o_O
    if SHAPE.scaling > 0:
        low = gl.load(scale_BO + step * SHAPE.units * scale_stride + o_O)
        high = low
        if SHAPE.units == 2:
            high = gl.load(scale_BO + gl.minimum(2 * step + 1, last_unit) * scale_stride + o_O)
    return low, high


@gluon.jit  # type: ignore[untyped-decorator]
def numbers_of_half(words, scale_O, HALF: gl.constexpr, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers [O, 64], of words [O, C]."""
    scale_O1 = scale_O.expand_dims(1)
    if SHAPE.code == 1:
        if SHAPE.units == 1:
            scale_O1 = _scales_of_runs(scale_O1, words, LAYOUT)
        w0, w1, w2, w3 = scaled_e2m1(words, scale_O1, 1)
        low = beside(w0, w1, LAYOUT)
        high = beside(w2, w3, LAYOUT)
        if SHAPE.units == 2:  # noqa: SIM108 - chosen at compile time
            numbers = beside(low, high, LAYOUT)
        else:
            numbers = high if HALF else low
    else:
        if SHAPE.code == 0:
            if SHAPE.scaling == 1:
                w0, w1, w2, w3 = scaled_int4(words, scale_O1)
            else:
                w0, w1, w2, w3 = plain_int4(words)
            low = beside(w0, w1, LAYOUT)
            high = beside(w2, w3, LAYOUT)
        elif SHAPE.code == 2:
            low, high = int8(words)
        elif SHAPE.masked:
            low, high = masked_e4m3(words, 1)
        else:
            low, high = e4m3(words, 1)
        numbers = high if HALF else low
        if SHAPE.scaling == 2:
            numbers = _times(numbers, scale_O1)
    return numbers


@gluon.jit  # type: ignore[untyped-decorator]
def exact_numbers_of_half(  # type: ignore[no-untyped-def]
    words, scale_O, parts, HALF: gl.constexpr, LAYOUT: gl.constexpr, SHAPE: gl.constexpr
):
    """Numbers [O, 64] of exact numerics, which are rounded with their factors: `parts` are those of `parts_of_outputs`.

    Those of int4 with scales of codes have no factors, and scales of units are rounded with numbers in any case.
    """
    if SHAPE.parts == 0 or SHAPE.scaling == 2:
        numbers = numbers_of_half(words, scale_O, HALF, LAYOUT, SHAPE)
    else:
        high_O, low_O = parts
        high_O1 = high_O.expand_dims(1)
        low_O1 = low_O.expand_dims(1)
        if SHAPE.code < 2:
            if SHAPE.code == 1:
                scale_O1 = scale_O.expand_dims(1)
                if SHAPE.units == 1:
                    scale_O1 = _scales_of_runs(scale_O1, words, LAYOUT)
                w0, w1, w2, w3 = e2m1_in_parts(words, scale_O1, high_O1, low_O1, SHAPE.parts, 1)
            else:
                w0, w1, w2, w3 = int4_in_parts(words, high_O1, low_O1, SHAPE.parts)
            low = beside(w0, w1, LAYOUT)
            high = beside(w2, w3, LAYOUT)
        elif SHAPE.code == 2:
            low, high = int8_in_parts(words, high_O1, low_O1, SHAPE.parts)
        else:
            low, high = e4m3_in_parts(words, high_O1, low_O1, SHAPE.parts, 1)
        if SHAPE.code == 1 and SHAPE.units == 2:  # noqa: SIM108 - chosen at compile time
            numbers = beside(low, high, LAYOUT)
        else:
            numbers = high if HALF else low
    return numbers


@gluon.jit  # type: ignore[untyped-decorator]
def chosen_numbers_of_half(  # type: ignore[no-untyped-def]
    words, scale_O, parts, HALF: gl.constexpr, LAYOUT: gl.constexpr, SHAPE: gl.constexpr
):
    """As `exact_numbers_of_half` or `numbers_of_half`."""
    if SHAPE.exact:
        numbers = exact_numbers_of_half(words, scale_O, parts, HALF, LAYOUT, SHAPE)
    else:
        numbers = numbers_of_half(words, scale_O, HALF, LAYOUT, SHAPE)
    return numbers


@gluon.jit  # type: ignore[untyped-decorator]
def parts_of_outputs(parts_O, o_O, SHAPE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Both parts [O] of outputs' factors, in either half of an int32; names where there are none."""
    high = o_O
    low = o_O
    if SHAPE.exact and SHAPE.parts > 0 and SHAPE.scaling != 2:
        parts = gl.load(parts_O + o_O)
        high = repeated(parts)
        low = repeated(parts >> 16)
    return high, low


@gluon.jit  # type: ignore[untyped-decorator]
def beside(a, b, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Two planes as one tile [O, 2 C]; no number moves between threads."""
    joined = gl.join(a, b).permute((0, 2, 1)).reshape((a.shape[0], 2 * a.shape[1]))
    return gl.convert_layout(joined, LAYOUT, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _scales_of_runs(scale_O1, words, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of each word, int32 [O, C], of those of two runs in an int64."""
    run = gl.zeros([words.shape[0], words.shape[1] // 2], gl.int32, LAYOUT)
    return beside(run + scale_O1.to(gl.int32), run + (scale_O1 >> 32).to(gl.int32), LAYOUT)


@gluon.jit
def _times(numbers, scale_O1):  # type: ignore[no-untyped-def]
    """Numbers times float32 scales, rounded to bfloat16; the two of a register are of one output."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .f32 low, high;
        shl.b32 low, $1, 16;
        and.b32 high, $1, 0xFFFF0000;
        mul.f32 low, low, $2;
        mul.f32 high, high, $2;
        cvt.rn.bf16x2.f32 $0, high, low;
        }
        """,
        "=r,r,f,f",
        [numbers, scale_O1],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )
