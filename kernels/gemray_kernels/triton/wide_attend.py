"""The program of `triton.wide_attention`, for sm_90: a warp fetches keys and values ahead, groups of warps attend.

Keys are the rows of both products, ``scores [L, M] = K · Qᵀ`` and ``sums [D, M] = Vᵀ · weights``, as a product of the
tensor cores has 64 rows and as few as eight columns: a decode row's eight heads of a KV head are multiplied without
padding. Tiles come by the memory accelerator, page by page, and both products read them where it has put them.

Slots behind a sequence's last key may hold anything, and 0 · NaN is NaN. So the last page is fetched from so far ahead
of its first slot that what lies behind the last key is left out; ahead of a page's first slot the accelerator puts
zeros, which are hidden.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
D head dim, M = (row, query head) pairs of a group of warps, L keys of a tile, B = 64 dims.
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

from gemray_kernels.triton.early_start import let_next_start, load_older, wait_having_let
from gemray_kernels.triton.gluon_ring import barrier, fetch, next_stage, ring_barriers, swizzled, viewed
from gemray_kernels.triton.wide_spans import MOST_SEQUENCES, TILE, item_of, items_of

HEAD_DIM = 512
BLOCK_D = 64
"""Dims that lie side by side in shared memory, 128 bytes."""
PAGE = 16
"""Slots of a page, all that are fetched at once."""
_TILE = gl.constexpr(TILE.value)
_HEAD_DIM = gl.constexpr(HEAD_DIM)
_BLOCK_D = gl.constexpr(BLOCK_D)
_BLOCKS = gl.constexpr(HEAD_DIM // BLOCK_D)
_PAGE = gl.constexpr(PAGE)
_BLOCK_S = gl.constexpr(MOST_SEQUENCES)
_ROWS_OF_128 = gl.constexpr(swizzled(2 * BLOCK_D, rank=2))
_BLOCK_BYTES = gl.constexpr(2 * TILE.value * BLOCK_D)


@dataclass(frozen=True)
class WideShape:
    """What the compiler knows of a call."""

    pairs: int
    """M: 8, 16 or 32."""
    groups: int
    """Groups of warps with pairs of their own, 1 or 2; all of them attend to the same keys."""
    num_heads: int
    num_kv_heads: int
    most_chunks: int
    key_blocks: int
    """Blocks of dims that keys are read in: all, or the first of each half, where the others follow from values."""
    k_stages: int
    v_stages: int
    """Tiles of keys and of values that shared memory has room for."""
    weights_in_keys: bool
    """Weights lie where a tile's keys were, once all groups have done with them; else in memory of their own."""
    early: bool

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Rows of an item."""
        return self.pairs * self.groups // self.group


@gluon.jit
def _items(tables, num_seqs, cut, WARPS: gl.constexpr, SHAPE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    s_S = gl.arange(0, _BLOCK_S, LAYOUT)
    return items_of(s_S, (tables[1], tables[2], num_seqs), cut, SHAPE.rows, SHAPE.num_kv_heads)


@gluon.jit
def _four_pages(table_P, key, end):
    """A tile's pages; where there are none any more, the last one."""
    first = key // _PAGE
    last = (end - 1) // _PAGE
    page0 = load_older(table_P + first)
    page1 = load_older(table_P + gl.minimum(first + 1, last))
    page2 = load_older(table_P + gl.minimum(first + 2, last))
    page3 = load_older(table_P + gl.minimum(first + 3, last))
    return page0, page1, page2, page3


@gluon.jit
def _fetch_page(pages, page, key, end, column, is_there, tile):
    """The page of a key and those behind it, in 64 dims: as many slots as there are keys come last."""
    slot = gl.minimum(gl.maximum(end - key, 0), _PAGE) - _PAGE
    fetch(pages, [page, slot, column], is_there, tile)


@gluon.jit
def _fetch_tile(pages, four, key, end, column, is_there, tiles, stage, BLOCKS: gl.constexpr):
    """A tile's keys, in as many blocks of dims, evenly apart."""
    mbarrier.expect(is_there, BLOCKS * _BLOCK_BYTES)
    for block in gl.static_range(BLOCKS):
        first = (stage * BLOCKS + block) * 4
        d = column + block * (_HEAD_DIM // BLOCKS)
        _fetch_page(pages, four[0], key, end, d, is_there, tiles.index(first))
        _fetch_page(pages, four[1], key + _PAGE, end, d, is_there, tiles.index(first + 1))
        _fetch_page(pages, four[2], key + 2 * _PAGE, end, d, is_there, tiles.index(first + 2))
        _fetch_page(pages, four[3], key + 3 * _PAGE, end, d, is_there, tiles.index(first + 3))


@gluon.jit
def _fetch_all(k_pages, v_pages, tables, table_stride, tiles, barriers, sizes, SHAPE: gl.constexpr):
    """All that the groups of this program attend to, in their order."""
    k_tiles, v_tiles = tiles
    k_ready, k_free, v_ready, v_free = barriers
    num_seqs, cut = sizes
    items, num_items = _items(tables, num_seqs, cut, 1, SHAPE)
    k_stage = 0
    k_phase = 1
    v_stage = 0
    v_phase = 1
    for i in range(gl.program_id(0), num_items, gl.num_programs(0)):
        of_sequence, place, span = item_of(i, items, cut, SHAPE.rows, SHAPE.num_kv_heads)
        begin, end = span
        table_P = tables[0] + of_sequence[0].to(gl.int64) * table_stride
        column = place[1] * _HEAD_DIM
        first_new = of_sequence[3] - of_sequence[2]
        following = _four_pages(table_P, begin, end)
        for key in range(begin, end, _TILE):
            four = following
            following = _four_pages(table_P, gl.minimum(key + _TILE, end - 1), end)
            if key + _TILE > first_new:
                wait_having_let(SHAPE.early)  # this step's own keys; those before are older than all that runs
            mbarrier.wait(k_free.index(k_stage), k_phase)
            is_there = k_ready.index(k_stage)
            _fetch_tile(k_pages, four, key, end, column, is_there, k_tiles, k_stage, SHAPE.key_blocks)
            k_stage, k_phase = next_stage(k_stage, k_phase, SHAPE.k_stages)
            mbarrier.wait(v_free.index(v_stage), v_phase)
            is_there = v_ready.index(v_stage)
            _fetch_tile(v_pages, four, key, end, column, is_there, v_tiles, v_stage, _BLOCKS)
            v_stage, v_phase = next_stage(v_stage, v_phase, SHAPE.v_stages)


@gluon.jit
def _take_queries(queries, q_tiles, start, num_rows, row, kv_head, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Bring a group's queries to shared memory [B, M, 64], times the keys' weight where values stand for keys."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_TND, weight_D, row_stride, head_stride = queries
    pair_M = GROUP * SHAPE.pairs + gl.arange(0, SHAPE.pairs, gl.SliceLayout(1, LAYOUT))
    row_M = row + pair_M // SHAPE.group
    head_M = kv_head * SHAPE.group + pair_M % SHAPE.group
    q_M = q_TND + (start + row_M).to(gl.int64) * row_stride + head_M * head_stride
    d_D = gl.arange(0, _BLOCK_D, gl.SliceLayout(0, LAYOUT))
    for block in gl.static_range(_BLOCKS):
        q_MD = gl.load((q_M + block * _BLOCK_D)[:, None] + d_D[None, :], mask=(row_M < num_rows)[:, None], other=0.0)
        if block % (_BLOCKS // SHAPE.key_blocks) != 0:
            weight_1D = gl.load(weight_D + block * _BLOCK_D + d_D).to(gl.float32)[None, :]
            q_MD = (q_MD.to(gl.float32) * weight_1D).to(q_MD.dtype)
        q_tiles.index(GROUP * _BLOCKS + block).store(q_MD)
    fence_async_shared()
    barrier()


@gluon.jit
def _scores(k_blocks, v_blocks, k_stage, v_stage, q_tiles, score_LM, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Scores of a tile, which both rings hold where values stand for keys."""
    APART: gl.constexpr = _BLOCKS // SHAPE.key_blocks
    for block in gl.static_range(_BLOCKS):
        q_DM = q_tiles.index(GROUP * _BLOCKS + block).permute((1, 0))
        if block % APART == 0:
            k_LD = k_blocks.index(k_stage * SHAPE.key_blocks + block // APART)
        else:
            k_LD = v_blocks.index(v_stage * _BLOCKS + block)
        score_LM = warpgroup_mma(k_LD, q_DM, score_LM, use_acc=block > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=(score_LM,))


@gluon.jit
def _hidden(score_LM, key, end, position_M):
    """Scores of keys that a row sees; -inf for others, and for what came ahead of the last page."""
    LAYOUT: gl.constexpr = score_LM.type.layout
    l_L = gl.arange(0, _TILE, gl.SliceLayout(1, LAYOUT))
    ahead_L = _PAGE - gl.minimum(gl.maximum(end - key - l_L // _PAGE * _PAGE, 0), _PAGE)
    key_L = key + l_L - ahead_L
    visible_LM = (l_L % _PAGE >= ahead_L)[:, None] & (key_L[:, None] <= position_M[None, :])
    return gl.where(visible_LM, score_LM, float("-inf"))


@gluon.jit
def _store(results, partial_M, is_row_M, largest_M, sum_M, acc_DM):
    """Store what a chunk's keys give each pair."""
    partial_o, partial_ml = results
    d_D = gl.arange(0, _HEAD_DIM, gl.SliceLayout(1, acc_DM.type.layout))
    gl.store(partial_o + (partial_M * _HEAD_DIM)[None, :] + d_D[:, None], acc_DM, mask=is_row_M[None, :])
    gl.store(partial_ml + partial_M * 2, largest_M, mask=is_row_M)
    gl.store(partial_ml + partial_M * 2 + 1, sum_M, mask=is_row_M)


@gluon.jit
def _attend(  # noqa: PLR0915
    queries, tables, results, tiles, barriers, scored, sizes, scale_log2, GROUP: gl.constexpr, SHAPE: gl.constexpr
):
    """The partial softmaxes of one group's pairs, item after item."""
    PAIRS: gl.constexpr = SHAPE.pairs
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PAIRS, 16])
    OF_PAIR: gl.constexpr = gl.SliceLayout(0, SUMS)
    K_BLOCKS: gl.constexpr = SHAPE.k_stages * SHAPE.key_blocks
    V_BLOCKS: gl.constexpr = SHAPE.v_stages * _BLOCKS
    V_STAGES: gl.constexpr = V_BLOCKS // _BLOCKS
    DTYPE: gl.constexpr = queries[0].dtype.element_ty
    k_tiles, v_tiles, q_tiles, weight_tiles = tiles
    k_ready, k_free, v_ready, v_free = barriers
    num_seqs, cut = sizes
    k_blocks = viewed(k_tiles, [K_BLOCKS, _TILE, _BLOCK_D], _ROWS_OF_128)
    v_blocks = viewed(v_tiles, [V_BLOCKS, _TILE, _BLOCK_D], _ROWS_OF_128)
    v_wholes = viewed(v_tiles, [V_STAGES, _TILE, _HEAD_DIM], _ROWS_OF_128)
    if SHAPE.weights_in_keys:
        IN_KEYS: gl.constexpr = SHAPE.key_blocks * _TILE // PAIRS
        weight_tiles = viewed(k_tiles, [SHAPE.k_stages * IN_KEYS, PAIRS, _TILE], _ROWS_OF_128)
    items, num_items = _items(tables, num_seqs, cut, 4, SHAPE)
    pair_M = GROUP * PAIRS + gl.arange(0, PAIRS, OF_PAIR)
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    scored_phase = 0
    wait_having_let(SHAPE.early)
    for i in range(gl.program_id(0), num_items, gl.num_programs(0)):
        of_sequence, place, span = item_of(i, items, cut, SHAPE.rows, SHAPE.num_kv_heads)
        begin, end = span
        row, kv_head, chunk = place
        start, num_rows, num_keys = of_sequence[1], of_sequence[2], of_sequence[3]
        _take_queries(queries, q_tiles, start, num_rows, row, kv_head, GROUP, SHAPE)
        row_M = row + pair_M // SHAPE.group
        first_position = num_keys - num_rows + row
        position_M = num_keys - num_rows + row_M
        largest_M = gl.full([PAIRS], float("-inf"), gl.float32, OF_PAIR)
        sum_LM = gl.zeros([_TILE, PAIRS], gl.float32, SUMS)
        acc_DM = gl.zeros([_HEAD_DIM, PAIRS], gl.float32, SUMS)
        for key in range(begin, end, _TILE):
            mbarrier.wait(k_ready.index(k_stage), k_phase)
            if SHAPE.key_blocks < _BLOCKS:
                mbarrier.wait(v_ready.index(v_stage), v_phase)
            score_LM = gl.zeros([_TILE, PAIRS], gl.float32, SUMS)
            score_LM = _scores(k_blocks, v_blocks, k_stage, v_stage, q_tiles, score_LM, GROUP, SHAPE)
            if key + _TILE > first_position + 1:
                score_LM = _hidden(score_LM, key, end, position_M)
            new_largest_M = gl.maximum(largest_M, gl.max(score_LM, 0) * scale_log2)
            # The maximum is over what all warps of the group have multiplied.
            if SHAPE.weights_in_keys:
                mbarrier.arrive(scored.index(0))
                weight_tile = weight_tiles.index(k_stage * IN_KEYS + GROUP).permute((1, 0))
            else:
                mbarrier.arrive(k_free.index(k_stage))
                weight_tile = weight_tiles.index(GROUP).permute((1, 0))
            shift_M = gl.where(new_largest_M == float("-inf"), 0.0, new_largest_M)  # nothing seen yet
            weight_LM = gl.exp2(score_LM * scale_log2 - shift_M[None, :])
            rescale_M = gl.exp2(largest_M - shift_M)
            largest_M = new_largest_M
            sum_LM = sum_LM * rescale_M[None, :] + weight_LM
            if SHAPE.weights_in_keys:
                mbarrier.wait(scored.index(0), scored_phase)
                scored_phase ^= 1
            weight_tile.store(weight_LM.to(DTYPE))
            fence_async_shared()
            if SHAPE.key_blocks == _BLOCKS:
                mbarrier.wait(v_ready.index(v_stage), v_phase)
            acc_DM = acc_DM * rescale_M[None, :]
            barrier()
            acc_DM = warpgroup_mma(v_wholes.index(v_stage).permute((1, 0)), weight_tile, acc_DM, is_async=True)
            acc_DM = warpgroup_mma_wait(0, deps=(acc_DM,))
            # What every warp of the group has done with may be overwritten.
            barrier()
            mbarrier.arrive(v_free.index(v_stage))
            if SHAPE.weights_in_keys:
                mbarrier.arrive(k_free.index(k_stage))
            k_stage, k_phase = next_stage(k_stage, k_phase, SHAPE.k_stages)
            v_stage, v_phase = next_stage(v_stage, v_phase, SHAPE.v_stages)
        head_M = kv_head * SHAPE.group + pair_M % SHAPE.group
        partial_M = ((start + row_M).to(gl.int64) * SHAPE.num_heads + head_M) * SHAPE.most_chunks + chunk
        _store(results, partial_M, row_M < num_rows, largest_M, gl.sum(sum_LM, 0), acc_DM)


@gluon.jit(do_not_specialize=["num_seqs", "fewest_chunks", "usual_tiles"])
def wide_attend_kernel(
    q_TND,
    k_pages,
    v_pages,
    weight_D,
    table_SP,
    query_start_Z,
    kv_len_S,
    partial_o,
    partial_ml,
    num_seqs,
    fewest_chunks,
    usual_tiles,
    scale_log2,
    q_row_stride,
    q_head_stride,
    table_stride,
    SHAPE: gl.constexpr,
    ATTEND_REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Attend with every item's pairs over its keys, for `combine_chunks_kernel`."""
    let_next_start(SHAPE.early)
    SLOTS: gl.constexpr = k_pages.layout
    DTYPE: gl.constexpr = q_TND.dtype.element_ty
    k_tiles = gl.allocate_shared_memory(DTYPE, [SHAPE.k_stages * SHAPE.key_blocks * 4, 1, _PAGE, _BLOCK_D], SLOTS)
    v_tiles = gl.allocate_shared_memory(DTYPE, [SHAPE.v_stages * _BLOCKS * 4, 1, _PAGE, _BLOCK_D], SLOTS)
    q_tiles = gl.allocate_shared_memory(DTYPE, [SHAPE.groups * _BLOCKS, SHAPE.pairs, _BLOCK_D], _ROWS_OF_128)
    weight_tiles = q_tiles  # a name, where weights lie among the keys
    if not SHAPE.weights_in_keys:
        weight_tiles = gl.allocate_shared_memory(DTYPE, [SHAPE.groups, SHAPE.pairs, _TILE], _ROWS_OF_128)
    k_ready, k_free = ring_barriers(SHAPE.groups, SHAPE.k_stages)
    v_ready, v_free = ring_barriers(SHAPE.groups, SHAPE.v_stages)
    scored = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(scored.index(0), count=SHAPE.groups)
    fence_async_shared()
    barrier()
    queries = (q_TND, weight_D, q_row_stride, q_head_stride)
    tables = (table_SP, query_start_Z, kv_len_S)
    results = (partial_o, partial_ml)
    tiles = (k_tiles, v_tiles, q_tiles, weight_tiles)
    barriers = (k_ready, k_free, v_ready, v_free)
    sizes = (num_seqs, (fewest_chunks, usual_tiles, SHAPE.most_chunks))
    if SHAPE.groups == 2:
        gl.warp_specialize(
            [
                (_attend, (queries, tables, results, tiles, barriers, scored, sizes, scale_log2, 0, SHAPE)),
                (_attend, (queries, tables, results, tiles, barriers, scored, sizes, scale_log2, 1, SHAPE)),
                (_fetch_all, (k_pages, v_pages, tables, table_stride, (k_tiles, v_tiles), barriers, sizes, SHAPE)),
            ],
            [4, 1],
            [ATTEND_REGISTERS, FETCH_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (queries, tables, results, tiles, barriers, scored, sizes, scale_log2, 0, SHAPE)),
                (_fetch_all, (k_pages, v_pages, tables, table_stride, (k_tiles, v_tiles), barriers, sizes, SHAPE)),
            ],
            [1],
            [FETCH_REGISTERS],
        )
