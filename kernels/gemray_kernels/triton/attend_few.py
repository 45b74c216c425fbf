"""Attention of few programs, for sm_90: a chunk of keys goes from memory straight to the registers that multiply it.

A decode step of one sequence has fewer programs than the device has room for, and each is a chain: lengths, table,
keys, scores, values. Here a program asks for all keys and values of its chunk but this step's own before it waits for
the kernel before, and for those few as soon as it has waited. Nothing goes through shared memory but scores.

Keys are the rows of the first product and dims those of the second, (row, head) pairs the columns: 8 of them are a
tile, where a product with pairs as its rows has 16. Which dim is which row or column of a tile is free as long as both
operands agree; so every thread has eight neighbouring dims of a key, and of a value, and loads them at once.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
M = (row, query head) pairs of one program, L keys of one tile, G its groups of 16, I keys of a group, D head dim.
"""

# Triton looks at annotations: they must not become strings, and a kernel's arguments have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from gemray_kernels.triton.attend_spans import ends_at_once, find_span
from gemray_kernels.triton.early_start import let_next_start, load_older, wait_having_let

HEAD_DIM = gl.constexpr(256)
HALF = gl.constexpr(128)
"""Dims of one of two sums of products, which need not wait for each other."""
GROUP_KEYS = gl.constexpr(16)
"""Keys that a warp multiplies at a time: they lie in one page."""


@gluon.constexpr_function
def _products(warps):
    """How registers hold sums: of scores, a warp has 16 keys; of results, 16 dims of every 16 · warps."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def _scores(warps, pairs):
    """How every warp holds all scores [L, M], as the second product takes weights."""
    bits = warps.bit_length() - 1
    registers = [[1, 0], [8, 0], *([16 << i, 0] for i in range(bits)), *([0, 8] for _ in range(pairs // 16))]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0] for _ in range(bits)], [], [16 * warps, pairs])


@gluon.constexpr_function
def _values(warps):
    """How registers hold values [G, I, D]: eight neighbouring dims of a key, each of another tile's row."""
    bits = warps.bit_length() - 1
    registers = [
        *([0, 0, 1 << i] for i in range(3)), [0, 1, 0], [0, 8, 0], *([1 << i, 0, 0] for i in range(bits)),
        *([0, 0, 64 << i] for i in range(bits, 2)),
    ]  # fmt: skip
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 64 << i] for i in range(bits)], [], [warps, 16, 256])


@gluon.constexpr_function
def _results(warps, pairs):
    """How registers hold results [M, D] that are stored: eight neighbouring dims at a time."""
    bits = warps.bit_length() - 1
    registers = [
        *([0, 1 << i] for i in range(3)), *([0, 64 << i] for i in range(bits, 2)), [1, 0],
        *([8, 0] for _ in range(pairs // 16)),
    ]  # fmt: skip
    lanes = [[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 64 << i] for i in range(bits)], [], [pairs, 256])


@gluon.jit
def _key_places(
    k_pages, table_P, tile, first, end, page_stride, SLOT: gl.constexpr, PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr
):
    """Keys [L] of a tile, and where they lie. One outside [first, end) stands for the nearest inside."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, _products(WARPS), 8))
    key_L = tile + gl.arange(0, GROUP_KEYS * WARPS, LAYOUT)
    key_L = gl.minimum(gl.maximum(key_L, first), end - 1)
    page_L = load_older(table_P + key_L // PAGE_SIZE).to(gl.int64)
    return key_L, k_pages + page_L * page_stride + (key_L % PAGE_SIZE) * SLOT


@gluon.jit
def _value_places(
    v_pages, table_P, tile, end, page_stride, SLOT: gl.constexpr, PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr
):
    """Keys [G, I] of a tile, and where their values lie; nowhere in particular behind the end."""
    OF_KEY: gl.constexpr = gl.SliceLayout(2, _values(WARPS))
    key_G = tile + GROUP_KEYS * gl.arange(0, WARPS, gl.SliceLayout(1, OF_KEY))
    page_G = load_older(table_P + key_G // PAGE_SIZE, mask=key_G < end, other=0).to(gl.int64)
    at_G = v_pages + page_G * page_stride + (key_G % PAGE_SIZE) * SLOT
    in_group_I = gl.arange(0, GROUP_KEYS, gl.SliceLayout(0, OF_KEY))
    return key_G[:, None] + in_group_I[None, :], at_G[:, None] + (in_group_I * SLOT)[None, :]


@gluon.jit
def _keys(at_L, is_there_L, before, WARPS: gl.constexpr):
    """Both halves of keys [L, D] from where they lie; `before` where they are not there."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.DotOperandLayout(0, _products(WARPS), 8))
    at_LD = at_L[:, None] + gl.arange(0, HALF, LAYOUT)[None, :]
    low, high = before
    low = load_older(at_LD, mask=is_there_L[:, None], other=low)
    return low, load_older(at_LD + HALF, mask=is_there_L[:, None], other=high)


@gluon.jit
def _load_values(at_GI, is_there_GI, before, WARPS: gl.constexpr):
    """Values [G, I, D] from where they lie; `before` where they are not there."""
    d_D = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, _values(WARPS))))
    return load_older(at_GI[:, :, None] + d_D[None, None, :], mask=is_there_GI[:, :, None], other=before)


@gluon.jit
def _attend_tile(
    q, k, v_GID, sums, tile, begin, end, position_M, is_row_M, scale_log2,
    WINDOW: gl.constexpr, CAUSAL: gl.constexpr, IS_FIRST: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The largest score of each pair, the sum of its weights and its weighted sum [D, M], with this tile's."""
    largest_M, sum_M, acc_DM = sums
    PAIRS: gl.constexpr = acc_DM.shape[1]
    LAYOUT: gl.constexpr = _products(WARPS)
    SCORES: gl.constexpr = _scores(WARPS, PAIRS)
    KEYS: gl.constexpr = GROUP_KEYS * WARPS
    zero_LM = gl.full([KEYS, PAIRS], 0.0, gl.float32, LAYOUT)
    score_LM = mma_v2(k[0], q[0], zero_LM) + mma_v2(k[1], q[1], zero_LM)
    score_LM = gl.convert_layout(score_LM, SCORES) * scale_log2
    key_L = tile + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    visible_LM = ((key_L >= begin) & (key_L < end))[:, None] & is_row_M[None, :]
    if CAUSAL:
        visible_LM = visible_LM & (key_L[:, None] <= position_M[None, :])
    if WINDOW > 0:
        visible_LM = visible_LM & (key_L[:, None] > position_M[None, :] - WINDOW)
    score_LM = gl.where(visible_LM, score_LM, float("-inf"))
    new_largest_M = gl.max(score_LM, 0)
    if not IS_FIRST:
        new_largest_M = gl.maximum(largest_M, new_largest_M)
    shift_M = gl.where(new_largest_M == float("-inf"), 0.0, new_largest_M)  # nothing seen yet
    weight_LM = gl.exp2(score_LM - shift_M[None, :])
    new_sum_M = gl.sum(weight_LM, 0)
    if not IS_FIRST:
        rescale_M = gl.exp2(largest_M - shift_M)
        new_sum_M += sum_M * rescale_M
        acc_DM = acc_DM * gl.convert_layout(rescale_M, gl.SliceLayout(0, LAYOUT))[None, :]
    # Dim ((x · warps + w) · 8 + lane) · 8 + r is row ((x, r's upper bits), w, r's lowest bit, lane) of the product.
    v_DL = v_GID.reshape((KEYS, 4 // WARPS, WARPS, 8, 2, 2, 2)).permute((1, 4, 5, 2, 6, 3, 0)).reshape((HEAD_DIM, KEYS))
    v_DL = gl.convert_layout(v_DL, gl.DotOperandLayout(0, LAYOUT, 2))
    weight_LM = gl.convert_layout(weight_LM.to(v_DL.dtype), gl.DotOperandLayout(1, LAYOUT, 2))
    return new_largest_M, new_sum_M, mma_v2(v_DL, weight_LM, acc_DM)


@gluon.jit
def _queries(
    q_TND, start, first_row, num_rows, row_stride, head_stride,
    BLOCK_ROWS: gl.constexpr, GROUP: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Both halves of the queries [D, M] of a block of rows."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(1, _products(WARPS), 8)
    pair_M = gl.arange(0, PAIRS, gl.SliceLayout(0, LAYOUT))
    row_M = first_row + pair_M // GROUP
    is_row_M = (pair_M < BLOCK_ROWS * GROUP) & (row_M < num_rows)
    head_M = gl.program_id(1) * GROUP + pair_M % GROUP
    at_M = q_TND + (start + row_M).to(gl.int64) * row_stride + head_M * head_stride
    at_DM = at_M[None, :] + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))[:, None]
    low = gl.load(at_DM, mask=is_row_M[None, :], other=0.0)
    return low, gl.load(at_DM + HALF, mask=is_row_M[None, :], other=0.0)


@gluon.jit
def _store(
    out, acc_DM, start, first_row, num_rows, chunk,
    CHUNKS: gl.constexpr, BLOCK_ROWS: gl.constexpr, GROUP: gl.constexpr, NUM_HEADS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Store a block's results [D, M] at its rows and heads, each of which has places for CHUNKS of them."""
    PAIRS: gl.constexpr = acc_DM.shape[1]
    LAYOUT: gl.constexpr = _results(WARPS, PAIRS)
    o_MD = acc_DM.reshape((4 // WARPS, 2, 2, WARPS, 2, 8, PAIRS)).permute((6, 0, 3, 5, 1, 2, 4))
    o_MD = gl.convert_layout(o_MD.reshape((PAIRS, HEAD_DIM)), LAYOUT)
    pair_M = gl.arange(0, PAIRS, gl.SliceLayout(1, LAYOUT))
    row_M = first_row + pair_M // GROUP
    is_row_M = (pair_M < BLOCK_ROWS * GROUP) & (row_M < num_rows)
    place_M = (start + row_M).to(gl.int64) * NUM_HEADS + gl.program_id(1) * GROUP + pair_M % GROUP
    at_M = out + (place_M * CHUNKS + chunk) * HEAD_DIM
    d_D = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    gl.store(at_M[:, None] + d_D[None, :], o_MD.to(out.dtype.element_ty), mask=is_row_M[:, None])


@gluon.jit(do_not_specialize=["num_seqs", "blocks_per_seq"])
def attend_few_kernel(  # noqa: PLR0915
    q_TND,
    k_pages,
    v_pages,
    table_SP,
    query_start_Z,
    kv_len_S,
    out_TND,
    partial_o,
    partial_ml,
    num_seqs,
    blocks_per_seq,
    scale_log2,
    q_row_stride,
    q_head_stride,
    page_stride,
    kv_head_stride,
    table_stride,
    WINDOW: gl.constexpr,
    CAUSAL: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    MOST_CHUNKS: gl.constexpr,
    GRID_CHUNKS: gl.constexpr,
    MIN_CHUNK: gl.constexpr,
    MAX_SPLIT_ROWS: gl.constexpr,
    EARLY: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SLOT: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    PAIRS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Attend with one block of rows over one chunk of keys, as `attend_kernel`; slots of partial results are rows.

    What says whose rows and pages these are is older than all that runs, and so are older keys than the rows'.
    """
    let_next_start(EARLY)
    sequence, start, first_row, num_rows, kv_len, begin, end, is_direct, is_idle = find_span(
        query_start_Z, kv_len_S, num_seqs, blocks_per_seq, WINDOW, CAUSAL, GROUP, MOST_CHUNKS, MIN_CHUNK,
        MAX_SPLIT_ROWS, 1, BLOCK_ROWS, False,
    )  # fmt: skip
    if ends_at_once(is_idle):
        return
    LAYOUT: gl.constexpr = _products(WARPS)
    KEYS: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 8)
    OF_PAIR: gl.constexpr = gl.SliceLayout(0, _scores(WARPS, PAIRS))
    TILE: gl.constexpr = GROUP_KEYS * WARPS
    zero_DM = gl.full([HEAD_DIM, PAIRS], 0.0, gl.float32, LAYOUT)
    kv_head = gl.program_id(1)
    k_pages += kv_head * kv_head_stride
    v_pages += kv_head * kv_head_stride
    table_P = table_SP + sequence.to(gl.int64) * table_stride
    if is_idle | (begin >= end):
        wait_having_let(EARLY)
        if not is_idle:  # rows that see no key, padding among them, give zeros, however many there are
            for row in range(first_row, num_rows, blocks_per_seq * BLOCK_ROWS):
                _store(out_TND, zero_DM, start, row, num_rows, 0, 1, BLOCK_ROWS, GROUP, NUM_HEADS, WARPS)
        return
    own = kv_len - num_rows
    tile = begin // TILE * TILE
    k_nothing = gl.full([TILE, HALF], 0.0, k_pages.dtype.element_ty, KEYS)
    v_nothing = gl.full([WARPS, GROUP_KEYS, HEAD_DIM], 0.0, v_pages.dtype.element_ty, _values(WARPS))
    key_L, k_at_L = _key_places(k_pages, table_P, tile, begin, end, page_stride, SLOT, PAGE_SIZE, WARPS)
    key_GI, v_at_GI = _value_places(v_pages, table_P, tile, end, page_stride, SLOT, PAGE_SIZE, WARPS)
    k = _keys(k_at_L, key_L < gl.minimum(own, end), (k_nothing, k_nothing), WARPS)
    v_GID = _load_values(v_at_GI, (key_GI >= begin) & (key_GI < gl.minimum(own, end)), v_nothing, WARPS)
    wait_having_let(EARLY)
    k = _keys(k_at_L, (key_L >= own) & (key_L < end), k, WARPS)
    v_GID = _load_values(v_at_GI, (key_GI >= gl.maximum(own, begin)) & (key_GI < end), v_GID, WARPS)

    q = _queries(q_TND, start, first_row, num_rows, q_row_stride, q_head_stride, BLOCK_ROWS, GROUP, PAIRS, WARPS)
    pair_M = gl.arange(0, PAIRS, OF_PAIR)
    row_M = first_row + pair_M // GROUP
    is_row_M = (pair_M < BLOCK_ROWS * GROUP) & (row_M < num_rows)
    sums = (
        gl.full([PAIRS], float("-inf"), gl.float32, OF_PAIR),
        gl.full([PAIRS], 0.0, gl.float32, OF_PAIR),
        zero_DM,
    )
    sums = _attend_tile(
        q, k, v_GID, sums, tile, begin, end, own + row_M, is_row_M, scale_log2, WINDOW, CAUSAL, True, WARPS
    )
    largest_M, sum_M, acc_DM = sums
    for later in range(tile + TILE, end, TILE):
        key_L, k_at_L = _key_places(k_pages, table_P, later, begin, end, page_stride, SLOT, PAGE_SIZE, WARPS)
        key_GI, v_at_GI = _value_places(v_pages, table_P, later, end, page_stride, SLOT, PAGE_SIZE, WARPS)
        k = _keys(k_at_L, key_L < end, (k_nothing, k_nothing), WARPS)
        v_GID = _load_values(v_at_GI, key_GI < end, v_nothing, WARPS)
        largest_M, sum_M, acc_DM = _attend_tile(
            q, k, v_GID, (largest_M, sum_M, acc_DM), later, begin, end, own + row_M, is_row_M, scale_log2,
            WINDOW, CAUSAL, False, WARPS,
        )  # fmt: skip

    if is_direct:
        total_M = gl.where(sum_M == 0.0, 1.0, sum_M)  # of rows that see no key, which give zeros
        acc_DM = acc_DM / gl.convert_layout(total_M, gl.SliceLayout(0, LAYOUT))[None, :]
        _store(out_TND, acc_DM, start, first_row, num_rows, 0, 1, BLOCK_ROWS, GROUP, NUM_HEADS, WARPS)
    else:
        chunk = gl.program_id(2)
        _store(partial_o, acc_DM, start, first_row, num_rows, chunk, GRID_CHUNKS, BLOCK_ROWS, GROUP, NUM_HEADS, WARPS)
        place_M = (start + row_M).to(gl.int64) * NUM_HEADS + kv_head * GROUP + pair_M % GROUP
        ml_at_M = partial_ml + (place_M * GRID_CHUNKS + chunk) * 2
        gl.store(ml_at_M, largest_M, mask=is_row_M)
        gl.store(ml_at_M + 1, sum_M, mask=is_row_M)
