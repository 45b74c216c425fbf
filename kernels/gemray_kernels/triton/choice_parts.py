"""What the Triton kernels of the token choice share: a slot's numbers, edited logits, values packed with ids."""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.slot_tables import MAX_CANDIDATES, MIN_TEMPERATURE, PROMPT_SEEN, Field

NO_ID = tl.constexpr(0x7FFFFFFF)
"""Lower half of a packed pair: this less the id; 0 where there is none."""
EMPTY = tl.constexpr(-2139095041 << 32)
"""The packed pair of -inf and no id, smaller than that of any id."""

_NUM_FIELDS = tl.constexpr(len(Field))
_REPETITION_PENALTY = tl.constexpr(int(Field.REPETITION_PENALTY))
_PRESENCE_PENALTY = tl.constexpr(int(Field.PRESENCE_PENALTY))
_FREQUENCY_PENALTY = tl.constexpr(int(Field.FREQUENCY_PENALTY))
_TEMPERATURE = tl.constexpr(int(Field.TEMPERATURE))
_TOP_K = tl.constexpr(int(Field.TOP_K))
_FREE_FROM = tl.constexpr(int(Field.FREE_FROM))
_EARLY_MASK = tl.constexpr(int(Field.EARLY_MASK))
_LATE_MASK = tl.constexpr(int(Field.LATE_MASK))
_PROMPT_SEEN = tl.constexpr(PROMPT_SEEN)
_MAX_CANDIDATES = tl.constexpr(float(MAX_CANDIDATES))
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)


@triton.jit  # type: ignore[untyped-decorator]
def integer(words_NF, slot, FIELD: tl.constexpr):  # type: ignore[no-untyped-def]
    """One int64 of a slot."""
    return tl.load(words_NF + slot * _NUM_FIELDS + FIELD)


@triton.jit  # type: ignore[untyped-decorator]
def number(words_NF, slot, FIELD: tl.constexpr):  # type: ignore[no-untyped-def]
    """One float64 of a slot."""
    return tl.load(words_NF + slot * _NUM_FIELDS + FIELD).to(tl.float64, bitcast=True)


@triton.jit
def temperature_of(words_NF, slot):  # type: ignore[no-untyped-def]
    """T as a divisor, float32."""
    return tl.maximum(number(words_NF, slot, _TEMPERATURE), _MIN_TEMPERATURE).to(tl.float32)


@triton.jit
def is_greedy(words_NF, slot):  # type: ignore[no-untyped-def]
    """Whether a slot's rows are greedy."""
    return number(words_NF, slot, _TEMPERATURE) == 0.0


@triton.jit
def is_filtered(words_NF, slot):  # type: ignore[no-untyped-def]
    """Whether a slot's rows draw from the candidates of their top_k."""
    top_k = number(words_NF, slot, _TOP_K)
    return (top_k > 0.0) & (top_k <= _MAX_CANDIDATES) & (number(words_NF, slot, _TEMPERATURE) != 0.0)


@triton.jit
def edited(  # type: ignore[no-untyped-def]
    logits_RV,
    row_stride,
    num_columns,
    softcap,
    words_NF,
    masks_MW,
    num_words,
    occurrences_NV,
    bias_NV,
    slot_R,
    position_R,
    drafts_RB,
    num_drafts,
    first_id,
    num_ids,
    added_column,
    first_added_id,
    num_added,
    row,
    column,
):
    """(edited logits, ids) of columns; -inf and -1 in padding. What is None is left out."""
    inside = column < num_columns
    slot = tl.load(slot_R + row)
    logit = tl.load(logits_RV + row * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    is_added = (column >= added_column) & (column < added_column + num_added)
    added_id = tl.where(is_added, first_added_id + column - added_column, -1)
    token = tl.where(column < num_ids, first_id + column, added_id)
    if softcap is not None:
        logit = tl.where(token >= 0, softcap * _tanh(tl.div_rn(logit, softcap)), float("-inf"))
    if masks_MW is not None:
        is_early = tl.load(position_R + row) < integer(words_NF, slot, _FREE_FROM)
        mask = tl.where(is_early, integer(words_NF, slot, _EARLY_MASK), integer(words_NF, slot, _LATE_MASK))
        word = tl.load(masks_MW + mask * num_words + (column >> 5), mask=inside, other=0)
        # Added, not written: a NaN stays visible.
        logit = tl.where(((word >> (column & 31)) & 1) != 0, logit + float("-inf"), logit)
    if occurrences_NV is not None:
        occurrences = tl.load(occurrences_NV + slot * num_columns + column, mask=inside, other=0)
        if drafts_RB is not None:
            b = 0
            while b < num_drafts:
                draft = tl.load(drafts_RB + row * num_drafts + b)
                occurrences += ((token == draft) & (draft >= 0)).to(tl.int32)
                b += 1
        repetition = number(words_NF, slot, _REPETITION_PENALTY).to(tl.float32)
        repeated = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        logit = tl.where(occurrences != 0, repeated, logit)
        count = occurrences & (_PROMPT_SEEN - 1)
        penalty = number(words_NF, slot, _PRESENCE_PENALTY) + number(words_NF, slot, _FREQUENCY_PENALTY) * count
        logit = tl.where(count > 0, logit - penalty.to(tl.float32), logit)
    if bias_NV is not None:
        logit += tl.load(bias_NV + slot * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    return logit, token


@triton.jit
def is_faulty(value):  # type: ignore[no-untyped-def]
    """NaN or +inf."""
    return (value != value) | (value == float("inf"))  # noqa: PLR0124


@triton.jit
def pack(value, token):  # type: ignore[no-untyped-def]
    """int64 in the order of values, then of ids from the largest on; what `is_faulty` is above everything."""
    value = tl.where(value == 0.0, 0.0, value)  # both zeros are one
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(is_faulty(value), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    low = tl.where(token < 0, 0, NO_ID - token.to(tl.int64))
    return (key.to(tl.int64) << 32) | low


@triton.jit
def unpack_value(packed):  # type: ignore[no-untyped-def]
    """The value; NaN for what was faulty."""
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def unpack_id(packed):  # type: ignore[no-untyped-def]
    """The id, int64; -1 where there is none."""
    low = packed & NO_ID
    return tl.where(low == 0, -1, NO_ID - low)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    size = tl.abs(x)
    falling = tl.exp(-2.0 * size)
    far = tl.div_rn(1.0 - falling, 1.0 + falling)
    # Near 0 the difference above loses its digits.
    s = x * x
    near = size * (1.0 + s * (-0.33333334 + s * (0.13333334 + s * (-0.053968254 + s * 0.021869488))))
    result = tl.where(size < 0.3, near, far)
    return tl.where(x < 0, -result, result)
