"""What Gluon kernels share in which one warp fetches tiles into a ring, and groups of warps multiply them."""

# Triton looks at annotations: they must not become strings, and a kernel's arguments have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import lru_cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gemray_kernels.triton.activation import gated_sums

# Triton 3.9 names these functions of Gluon's anew.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@lru_cache
def swizzled(num_bytes: int, bits: int = 16, *, rank: int) -> gl.NVMMASharedLayout:
    """How the accelerator lays tiles with rows of so many bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=num_bytes, element_bitwidth=bits, rank=rank)


@gluon.constexpr_function
def in_wide_rows(num_out, num_words):
    """How words [O, C] of 16 bits lie in swizzled rows of 128 bytes, each of several outputs.

    The accelerator is slower with shorter rows. It exclusive-ors the place of 16 bytes in a row with the row's number.
    """
    places = [[0, 1 << bit] for bit in range(num_words.bit_length() - 1)]
    places += [[1 << bit, 0] for bit in range(6 - len(places))]
    output = 64 // num_words
    rows: list[list[int]] = []
    while output < num_out:
        flipped = places[3 + len(rows)] if len(rows) < 3 else [0, 0]
        rows.append([output ^ flipped[0], flipped[1]])
        output *= 2
    return gl.SharedLinearLayout(places + rows)


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def viewed(tiles, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr = None):
        """The same shared memory as tiles of another shape, in another layout, and of another type if one is given."""
        return tiles.reinterpret(tiles.dtype if DTYPE is None else DTYPE, SHAPE, LAYOUT)
else:

    @gluon.jit
    def viewed(tiles, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr = None):
        """The same shared memory as tiles of another shape, in another layout, and of another type if one is given."""
        return tiles._reinterpret(tiles.dtype if DTYPE is None else DTYPE, SHAPE, LAYOUT)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage behind one in a ring, and the phase of its barriers."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def ring_barriers(GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Barriers of a ring: each stage's is passed once it is fetched, and once all groups have done with it."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    return ready, free


@gluon.jit
def gated_halves(acc, dtype, GELU: gl.constexpr):
    """``act(gate) · up`` [O, T] of sums [2O, T] of four warps, with gate rows above up rows.

    Of 64 outputs a thread has both. Else the warps that hold gate rows and those that hold up rows share them out anew.
    """
    PAIRS: gl.constexpr = gl.BlockedLayout([4, 1, 2], [8, 4, 1], [1, 4, 1], [2, 0, 1])
    PLAIN: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    pairs = acc.reshape([2, acc.shape[0] // 2, acc.shape[1]]).permute(1, 2, 0)
    if acc.shape[0] % 128:
        gate, up = gl.convert_layout(pairs, PAIRS).split()
        gated = gl.convert_layout(gated_sums(gate, up, dtype, GELU), PLAIN)
    else:
        gate, up = pairs.split()
        gated = gated_sums(gate, up, dtype, GELU)
    return gated


@gluon.jit
def store_sums(acc, out_tile, results, place, sizes, WHOLE: gl.constexpr):
    """Store a tile's results [O, T] at its split, first row and first output.

    Whole sums, of bfloat16, go by way of shared memory [T, O], where outputs come to lie side by side; parts are stored
    as they are.
    """
    out_TO, out_STO = results
    split, t, o = place
    if WHOLE:
        tma.store_wait(0)
        barrier()
        out_tile.permute((1, 0)).store(acc.to(out_tile.dtype))
        fence_async_shared()
        barrier()
        write(out_TO, [t, o], out_tile)
    else:
        num_rows, num_out = sizes
        LAYOUT: gl.constexpr = acc.type.layout
        o_O = o + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
        t_T = t + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
        at_T = out_STO + (split * num_rows + t_T).to(gl.int64) * num_out
        is_there = (t_T < num_rows)[None, :] & (o_O < num_out)[:, None]
        gl.store(at_T[None, :] + o_O[:, None], acc, mask=is_there)
