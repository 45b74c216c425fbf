"""The program of `triton.whole_attention`: blocks of rows and a KV head over all keys that the rows see.

One warp fetches pages into a ring by the tensor memory accelerator, from before the queries are there; four warps
multiply. Few (row, query head) pairs would leave most of a product's 64 rows empty were they its left side, so keys
are: scores are [keys, pairs], sums [dims, pairs].

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
D head dim, M = (row, query head) pairs of one program, L keys of a tile, E dims of a unit, U units of the ring.
"""

# Triton looks at annotations: they must not become strings, and a kernel's arguments have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gemray_kernels.triton.early_start import load_older, wait_for_inputs, wait_having_let
from gemray_kernels.triton.gluon_ring import barrier, fetch, next_stage, ring_barriers, swizzled, viewed

PAGE_SIZE = gl.constexpr(16)
KEYS = gl.constexpr(64)
"""Keys of a tile: rows of a product of the tensor cores."""
PIECE = gl.constexpr(64)
"""Dims of a request: 128 bytes, which the accelerator swizzles."""
UNIT = gl.constexpr(128)
"""Dims of a unit: what of a tile's keys or values is fetched and freed at a time."""
WHOLE = gl.constexpr(swizzled(128, rank=2))
"""How products find tiles of these pieces."""


@dataclass(frozen=True)
class WholeShape:
    """What the compiler knows of an attention."""

    num_heads: int
    group: int
    head_dim: int
    """128 or 256: one unit, or two."""
    window: int
    causal: bool
    pairs: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows of a program."""
        return self.pairs // self.group


@gluon.jit
def _page(table_P, num_pages, first, span):
    """The page of the keys from `first` on, and the slot from which on it is fetched.

    Slots before and behind the sequence's keys may hold anything. So what is fetched of the first page begins at the
    first key, and of the last page ends at the last one: beside them lie zeros, for there are no such slots.
    """
    begin, end = span
    is_there = (first < end) & (first + PAGE_SIZE > begin)
    page = load_older(table_P + first // PAGE_SIZE, mask=is_there, other=num_pages)
    return page, _skipped(first, span)


@gluon.jit
def _skipped(first, span):
    """Slots by which the keys of a page that starts at `first` lie before their places."""
    begin, end = span
    skipped = gl.where(first < begin, begin - first, 0)
    return gl.where(first + PAGE_SIZE > end, end - first - PAGE_SIZE, skipped)


@gluon.jit
def _fetch_units(desc, pages, kv_head, ring, place, SHAPE: gl.constexpr):
    """All units of a tile's keys or values; the stage behind them, and its phase."""
    UNIT_PIECES: gl.constexpr = UNIT // PIECE
    tiles, ready, free = ring
    stage, phase = place
    for unit in gl.static_range(SHAPE.head_dim // UNIT):
        is_there = ready.index(stage)
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(is_there, KEYS // PAGE_SIZE * UNIT_PIECES * desc.block_type.nbytes)
        for i in gl.static_range(KEYS // PAGE_SIZE):
            page, slot = pages[i]
            for piece in gl.static_range(UNIT_PIECES):
                to = tiles.index((stage * UNIT_PIECES + piece) * (KEYS // PAGE_SIZE) + i)
                fetch(desc, [page, slot, kv_head, unit * UNIT + piece * PIECE], is_there, to)
        stage, phase = next_stage(stage, phase, SHAPE.stages)
    return stage, phase


@gluon.jit
def _span(first_row, lengths, SHAPE: gl.constexpr):
    """Keys [begin, end) that some row of a block sees."""
    num_rows, kv_len = lengths
    first_position = kv_len - num_rows + first_row
    begin = gl.maximum(first_position - SHAPE.window + 1, 0)
    end = kv_len
    if SHAPE.causal:
        end = gl.maximum(gl.minimum(first_position + SHAPE.rows, kv_len), 0)
    return gl.where(kv_len > 0, begin, 0), gl.where(kv_len > 0, end, 0)


@gluon.jit
def _fetch_tiles(
    descs,
    table_P,
    num_pages,
    queries,
    ring,
    place,
    lengths,
    EARLY: gl.constexpr,
    AHEAD: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Queries of each block of rows, and keys and values in turns. The first block's first tiles come before the wait,
    but for those that hold a key of this step."""
    q_desc, k_desc, v_desc = descs
    q_tiles, q_ready, q_free = queries
    start, kv_head, first_row = place
    num_rows, kv_len = lengths
    stage = 0
    phase = 1
    q_phase = 1
    for block_row in range(first_row, num_rows, gl.num_programs(1) * SHAPE.rows):
        span = _span(block_row, lengths, SHAPE)
        begin, end = span
        first_tile = begin // KEYS
        last_tile = gl.cdiv(end, KEYS) - 1
        old_tiles = gl.maximum(gl.minimum((kv_len - num_rows) // KEYS, last_tile) - first_tile, 0)
        waiting = first_tile + gl.where(block_row == first_row, gl.minimum(old_tiles, AHEAD), 0)
        for tile in range(first_tile, last_tile + 1):
            if tile == waiting:
                wait_having_let(EARLY)
                mbarrier.wait(q_free, q_phase)
                mbarrier.expect(q_ready, SHAPE.head_dim // PIECE * q_desc.block_type.nbytes)
                for piece in gl.static_range(SHAPE.head_dim // PIECE):
                    at = [start + block_row, kv_head * SHAPE.group, piece * PIECE]
                    fetch(q_desc, at, q_ready, q_tiles.index(piece))
            first = tile * KEYS
            pages = (
                _page(table_P, num_pages, first, span),
                _page(table_P, num_pages, first + PAGE_SIZE, span),
                _page(table_P, num_pages, first + 2 * PAGE_SIZE, span),
                _page(table_P, num_pages, first + 3 * PAGE_SIZE, span),
            )
            stage, phase = _fetch_units(k_desc, pages, kv_head, ring, (stage, phase), SHAPE)
            stage, phase = _fetch_units(v_desc, pages, kv_head, ring, (stage, phase), SHAPE)
        if last_tile < first_tile:
            # Zeros are stored by way of the memory of queries: the next ones may not come before that.
            mbarrier.wait(q_free, q_phase)
        q_phase ^= 1
    wait_having_let(EARLY)


@gluon.jit
def _attend_blocks(  # noqa: PLR0915
    out_TND, queries, weights_LM, ring, place, lengths, scale_log2, EARLY: gl.constexpr, SHAPE: gl.constexpr
):
    """Blocks of rows: a tile's scores, their weights by the largest so far, and what the weighted values add."""
    M: gl.constexpr = SHAPE.pairs
    UNITS: gl.constexpr = SHAPE.head_dim // UNIT
    STAGES: gl.constexpr = SHAPE.stages
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    OF_PAIR: gl.constexpr = gl.SliceLayout(0, ACC)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q_tiles, q_ready, q_free = queries
    tiles, ready, free = ring
    start, kv_head, first_row = place
    num_rows, kv_len = lengths
    q_UME = viewed(q_tiles, [UNITS, M, UNIT], WHOLE)
    kv_ULE = viewed(tiles, [STAGES, KEYS, UNIT], WHOLE)
    offset_L = gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    zero_LM = gl.zeros([KEYS, M], gl.float32, ACC)
    wait_for_inputs(EARLY)
    stage = 0
    phase = 0
    q_phase = 0
    for block_row in range(first_row, num_rows, gl.num_programs(1) * SHAPE.rows):
        span = _span(block_row, lengths, SHAPE)
        begin, end = span
        row_M = block_row + gl.arange(0, M, OF_PAIR) // SHAPE.group
        position_M = gl.where(row_M < num_rows, kv_len - num_rows + row_M, -1)
        largest_M = gl.full([M], float("-inf"), gl.float32, OF_PAIR)
        sum_LM = gl.zeros([KEYS, M], gl.float32, ACC)
        low_EM = gl.zeros([UNIT, M], gl.float32, ACC)
        high_EM = low_EM
        for tile in range(begin // KEYS, gl.cdiv(end, KEYS)):
            mbarrier.wait(q_ready, q_phase)
            mbarrier.wait(ready.index(stage), phase)
            first = stage
            q_EM = q_UME.index(0).permute((1, 0))
            score_LM = warpgroup_mma(kv_ULE.index(stage), q_EM, zero_LM, use_acc=False, is_async=True)
            if UNITS == 2:
                stage, phase = next_stage(stage, phase, STAGES)
                mbarrier.wait(ready.index(stage), phase)
                q_EM = q_UME.index(1).permute((1, 0))
                score_LM = warpgroup_mma(kv_ULE.index(stage), q_EM, score_LM, is_async=True)
            place_L = tile * KEYS + offset_L
            page_L = place_L // PAGE_SIZE * PAGE_SIZE
            key_L = place_L + _skipped(page_L, span)
            inside_L = (key_L >= page_L) & (key_L < page_L + PAGE_SIZE) & (page_L < end)
            visible_LM = inside_L[:, None] & (key_L[:, None] > position_M[None, :] - SHAPE.window)
            if SHAPE.causal:
                visible_LM = visible_LM & (key_L[:, None] <= position_M[None, :])
            score_LM = warpgroup_mma_wait(0, deps=(score_LM,))
            # What every warp has done with may be overwritten.
            barrier()
            mbarrier.arrive(free.index(first))
            if UNITS == 2:
                mbarrier.arrive(free.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
            score_LM = gl.where(visible_LM, score_LM * scale_log2, float("-inf"))
            new_largest_M = gl.maximum(largest_M, gl.max(score_LM, axis=0))
            shift_M = gl.where(new_largest_M == float("-inf"), 0.0, new_largest_M)  # nothing seen yet
            weight_LM = gl.exp2(score_LM - shift_M[None, :])
            rescale_M = gl.exp2(largest_M - shift_M)
            largest_M = new_largest_M
            weights_LM.store(weight_LM.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            # Each thread sums its own keys, all threads' are added behind the last tile.
            sum_LM = sum_LM * rescale_M[None, :] + weight_LM
            low_EM *= rescale_M[None, :]
            mbarrier.wait(ready.index(stage), phase)
            first = stage
            low_EM = warpgroup_mma(kv_ULE.index(stage).permute((1, 0)), weights_LM, low_EM, is_async=True)
            if UNITS == 2:
                high_EM *= rescale_M[None, :]
                stage, phase = next_stage(stage, phase, STAGES)
                mbarrier.wait(ready.index(stage), phase)
                high_EM = warpgroup_mma(kv_ULE.index(stage).permute((1, 0)), weights_LM, high_EM, is_async=True)
                low_EM, high_EM = warpgroup_mma_wait(0, deps=(low_EM, high_EM))
            else:
                low_EM = warpgroup_mma_wait(0, deps=(low_EM,))
            barrier()
            mbarrier.arrive(free.index(first))
            if UNITS == 2:
                mbarrier.arrive(free.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)

        total_M = gl.sum(sum_LM, axis=0)
        over_M = 1.0 / gl.where(total_M == 0.0, 1.0, total_M)  # rows that see no key give zeros
        # By way of shared memory, where queries were, dims come to lie side by side.
        q_UME.index(0).permute((1, 0)).store((low_EM * over_M[None, :]).to(gl.bfloat16))
        if UNITS == 2:
            q_UME.index(1).permute((1, 0)).store((high_EM * over_M[None, :]).to(gl.bfloat16))
        barrier()
        pair_M = gl.arange(0, M, gl.SliceLayout(1, OUT))
        e_E = gl.arange(0, UNIT, gl.SliceLayout(0, OUT))
        to_M = block_row + pair_M // SHAPE.group
        head_M = kv_head * SHAPE.group + pair_M % SHAPE.group
        at_M = out_TND + ((start + to_M).to(gl.int64) * SHAPE.num_heads + head_M) * SHAPE.head_dim
        is_stored_ME = (to_M < num_rows)[:, None] & (e_E < UNIT)[None, :]
        for unit in gl.static_range(UNITS):
            gl.store(at_M[:, None] + unit * UNIT + e_E[None, :], q_UME.index(unit).load(OUT), mask=is_stored_ME)
        fence_async_shared()
        barrier()
        mbarrier.arrive(q_free)
        q_phase = gl.where(end > begin, q_phase ^ 1, q_phase)


@gluon.jit(do_not_specialize=["num_pages"])
def attend_whole_kernel(
    q_desc,
    k_desc,
    v_desc,
    table_SP,
    query_start_Z,
    kv_len_S,
    out_TND,
    num_pages,
    table_stride,
    scale_log2,
    SHAPE: gl.constexpr,
    EARLY: gl.constexpr,
    AHEAD: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Attend with blocks of rows and a KV head, having asked for earlier keys before the wait."""
    STAGES: gl.constexpr = SHAPE.stages
    PIECES: gl.constexpr = STAGES * (UNIT // PIECE) * (KEYS // PAGE_SIZE)
    q_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [SHAPE.head_dim // PIECE, SHAPE.rows, SHAPE.group, PIECE], q_desc.layout
    )
    kv_tiles = gl.allocate_shared_memory(gl.bfloat16, [PIECES, 1, PAGE_SIZE, 1, PIECE], k_desc.layout)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * SHAPE.pairs, element_bitwidth=16, rank=2)
    weights_LM = gl.allocate_shared_memory(gl.bfloat16, [KEYS, SHAPE.pairs], WEIGHTS)
    q_ready, q_free = ring_barriers(1, 1)
    ready, free = ring_barriers(1, STAGES)
    fence_async_shared()
    barrier()

    KV_HEADS: gl.constexpr = SHAPE.num_heads // SHAPE.group
    sequence = gl.program_id(0) // KV_HEADS
    kv_head = gl.program_id(0) % KV_HEADS
    first_row = gl.program_id(1) * SHAPE.rows
    start = load_older(query_start_Z + sequence).to(gl.int32)
    num_rows = load_older(query_start_Z + sequence + 1).to(gl.int32) - start
    kv_len = load_older(kv_len_S + sequence).to(gl.int32)
    table_P = table_SP + sequence.to(gl.int64) * table_stride
    queries = (q_tiles, q_ready.index(0), q_free.index(0))
    ring = (kv_tiles, ready, free)
    place = (start, kv_head, first_row)
    lengths = (num_rows, kv_len)
    gl.warp_specialize(
        [
            (_attend_blocks, (out_TND, queries, weights_LM, ring, place, lengths, scale_log2, EARLY, SHAPE)),
            (
                _fetch_tiles,
                ((q_desc, k_desc, v_desc), table_P, num_pages, queries, ring, place, lengths, EARLY, AHEAD, SHAPE),
            ),
        ],
        [1],
        [FETCH_REGISTERS],
    )
