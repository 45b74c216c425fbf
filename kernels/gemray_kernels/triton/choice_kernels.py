"""The Triton kernels of the token choice; `triton.token_choice` launches them and tells how they fit together.

Shape legend: R rows, V local vocabulary columns, N blocks of columns or slots, L listed ids of a row, P ranks, W pairs
that a rank offers for a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemray_kernels.reference.token_choice import MASS_ONE
from gemray_kernels.slot_tables import Field
from gemray_kernels.triton.choice_parts import (
    EMPTY,
    edited,
    integer,
    is_faulty,
    is_filtered,
    is_greedy,
    number,
    pack,
    temperature_of,
    unpack_id,
    unpack_value,
)
from gemray_kernels.triton.keyed_noise import gumbel

TOP_K = tl.constexpr(int(Field.TOP_K))
TOP_P = tl.constexpr(int(Field.TOP_P))
MIN_P = tl.constexpr(int(Field.MIN_P))
SEED = tl.constexpr(int(Field.SEED))
MASS = tl.constexpr(MASS_ONE)


@triton.jit(do_not_specialize=["num_drafts"])  # type: ignore[untyped-decorator]
def edit_kernel(  # type: ignore[no-untyped-def]
    edited_RV,
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
    BLOCK: tl.constexpr,
):
    """Write the edited logits out, where more than one pass needs them."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit, _ = edited(
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
    )
    tl.store(edited_RV + row * num_columns + column, logit, mask=column < num_columns)


@triton.jit(do_not_specialize=["num_drafts"])  # type: ignore[untyped-decorator]
def best_kernel(  # type: ignore[no-untyped-def]
    best_RN,
    num_listed_R,
    cut_value_R,
    cut_id_R,
    cut_floor_R,
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
    num_blocks,
    NOISE: tl.constexpr,
    FILTERED: tl.constexpr,
    BELOW_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of each block: by noisy score where the row draws from the whole vocabulary, else by logit."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    logit, token = edited(
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
    )
    if block == 0:
        tl.store(num_listed_R + row, 0)
    score = logit
    if NOISE:
        slot = tl.load(slot_R + row)
        draws = ~is_greedy(words_NF, slot)
        if FILTERED:
            draws = draws & ~is_filtered(words_NF, slot)
        if draws:
            scaled = tl.div_rn(logit, temperature_of(words_NF, slot))
            seed = integer(words_NF, slot, SEED)
            score = scaled + gumbel(seed, tl.load(position_R + row), tl.maximum(token, 0), tl.float32, BELOW_ONE)
            if cut_value_R is not None:
                last = tl.load(cut_value_R + row)
                stays = (logit > last) | ((logit == last) & (token <= tl.load(cut_id_R + row)))
                stays = stays & (scaled >= tl.load(cut_floor_R + row))
                score = tl.where(is_faulty(logit), float("inf"), tl.where(stays, score, float("-inf")))
    tl.store(best_RN + row * num_blocks + block, tl.max(pack(score, token), axis=0))


@triton.jit(do_not_specialize=["num_drafts"])  # type: ignore[untyped-decorator]
def list_kernel(  # type: ignore[no-untyped-def]
    listed_RL,
    num_listed_R,
    best_RN,
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
    num_blocks,
    CANDIDATES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the ids that may be among the candidates; most programs end at once, as their block has none.

    The order of a row's list differs from run to run; what is in it does not.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slot_R + row)
    blocks = tl.arange(0, BLOCKS)
    best = tl.load(best_RN + row * num_blocks + blocks, mask=blocks < num_blocks, other=EMPTY)
    own_best = tl.load(best_RN + row * num_blocks + block)
    num_better = tl.sum((best > own_best).to(tl.int32), axis=0)
    if (num_better < CANDIDATES) & (is_filtered(words_NF, slot) | is_greedy(words_NF, slot)):
        least = tl.min(best, axis=0)
        if CANDIDATES < BLOCKS:
            least = tl.min(tl.topk(best, CANDIDATES), axis=0)
        column = block * BLOCK + tl.arange(0, BLOCK)
        logit, token = edited(
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
        )
        packed = pack(logit, token)
        may_be = (packed >= least) & (packed > EMPTY)
        count = tl.minimum(tl.sum(may_be.to(tl.int32), axis=0), CANDIDATES)
        if count > 0:
            first = tl.atomic_add(num_listed_R + row, count)
            out = listed_RL + row * CANDIDATES * CANDIDATES + first
            remaining = tl.where(may_be, packed, EMPTY)
            i = 0
            while i < count:
                largest = tl.max(remaining, axis=0)
                tl.store(out + i, largest)
                remaining = tl.where(remaining == largest, EMPTY, remaining)
                i += 1


@triton.jit  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    offer_RW,
    offer_stride,
    best_RN,
    num_blocks,
    listed_RL,
    num_listed_R,
    WHOLE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The best of each row's blocks, and the largest of its list in order."""
    row = tl.program_id(0).to(tl.int64)
    out = offer_RW + row * offer_stride
    if WHOLE:
        blocks = tl.arange(0, BLOCKS)
        best = tl.load(best_RN + row * num_blocks + blocks, mask=blocks < num_blocks, other=EMPTY)
        tl.store(out, tl.max(best, axis=0))
    if listed_RL is not None:
        num_listed = tl.load(num_listed_R + row)
        place = tl.arange(0, CANDIDATES)
        list_L = listed_RL + row * CANDIDATES * CANDIDATES
        top = tl.full([CANDIDATES], EMPTY, tl.int64)
        first = 0
        while first < num_listed:
            more = tl.load(list_L + first + place, mask=first + place < num_listed, other=EMPTY)
            top = tl.topk(tl.cat(top, more, can_reorder=True), CANDIDATES)
            first += CANDIDATES
        tl.store(out + WHOLE + place, top)


@triton.jit(do_not_specialize=["rank_stride"])  # type: ignore[untyped-decorator]
def decide_kernel(  # type: ignore[no-untyped-def]
    ids_R,
    offers_PRW,
    rank_stride,
    row_stride,
    words_NF,
    slot_R,
    position_R,
    BELOW_ONE: tl.constexpr,
    WHOLE: tl.constexpr,
    RANKS: tl.constexpr,
    TOP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The best of all ranks; where a row takes candidates, top_k, top_p and min_p of them and the best that is left."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_R + row)
    offer = offers_PRW + row * row_stride
    chosen = tl.load(offer)
    if WHOLE:
        for rank in tl.static_range(1, RANKS):
            chosen = tl.maximum(chosen, tl.load(offer + rank * rank_stride))
    if CANDIDATES > 0:  # noqa: SIM102
        if (not WHOLE) | is_filtered(words_NF, slot) | is_greedy(words_NF, slot):
            place = tl.arange(0, WIDTH)
            source = offer + (place // TOP) * rank_stride + WHOLE + place % TOP
            best = tl.topk(tl.load(source, mask=place < RANKS * TOP, other=EMPTY), CANDIDATES)
            chosen = tl.max(best, axis=0)
            if is_filtered(words_NF, slot):
                nth = tl.arange(0, CANDIDATES)
                token = unpack_id(best)
                scaled = tl.div_rn(unpack_value(best), temperature_of(words_NF, slot))
                largest = tl.max(scaled, axis=0)
                in_top_k = nth < number(words_NF, slot, TOP_K)
                weight = tl.exp((scaled - largest).to(tl.float64))
                mass = tl.where(in_top_k, tl.floor(weight * MASS + 0.5).to(tl.int64), 0)
                before = tl.cumsum(mass, axis=0) - mass
                top_p = number(words_NF, slot, TOP_P)
                target = tl.where(top_p >= 1.0, float("inf"), top_p * tl.sum(mass, axis=0).to(tl.float64))
                kept = in_top_k & (before.to(tl.float64) < target)
                kept = kept & (scaled >= largest + tl.log(number(words_NF, slot, MIN_P)).to(tl.float32))
                seed = integer(words_NF, slot, SEED)
                noise = gumbel(seed, tl.load(position_R + row), tl.maximum(token, 0), tl.float32, BELOW_ONE)
                score = tl.where(is_faulty(scaled), float("inf"), tl.where(kept, scaled + noise, float("-inf")))
                chosen = tl.max(pack(score, token), axis=0)
    value = unpack_value(chosen)
    # Below -inf nothing is, and what is faulty is not below +inf.
    usable = (value > float("-inf")) & (value < float("inf"))
    tl.store(ids_R + row, tl.where(usable, unpack_id(chosen), -1))
