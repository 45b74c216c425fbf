"""Pieces of 64 weight rows that groups of four warps multiply with all rows of a tile, for sm_90.

What kernels of 65 to 256 rows share, in exact numerics and in fast ones: a tile's rows are one power of two, or the sum
of two, each with sums of its own, so that 160 rows are 128 and 32 and no row is padded far.

Shape legend: O outputs, T rows.
"""

# Triton looks at annotations: they must not become strings, and a kernel's arguments have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

PIECE = gl.constexpr(64)
"""Weight rows of a group of warps: what wgmma multiplies at once."""
BLOCK_I = gl.constexpr(64)
"""Inputs of a tile, 128 bytes, whose rows wgmma reads from shared memory as the accelerator swizzles them."""
LEAST_PART = 16
MOST_WIDTH = 256
"""Columns of one product of wgmma, and of a tile."""
FETCH_REGISTERS = 24
MULTIPLY_REGISTERS = {1: 240, 2: 240, 3: 160}
"""Registers of a thread, by groups of warps: what the 65,536 of a multiprocessor leave."""
SHARED_BYTES = 225 * 1024
"""Shared memory for tiles that wait to be multiplied."""
MOST_STAGES = 8
WIDTHS = (48, 64, 80, 96, 128, 144, 160, 192, 256)
"""Widths of tiles: 16 or more in each of two powers of two."""
ROWS = (80, 96, 128, 160, 192, 256)
"""Numbers of rows for which tiles are chosen, the next one for those between: a weight has six programs at most."""


def parts_of(width: int) -> tuple[int, int]:
    """The two powers of two that a width is the sum of; the second may be none."""
    first = 1 << (width.bit_length() - 1)
    return first, width - first


def check_pieces(groups: int, width: int) -> None:
    """Check what kernels of pieces rely on.

    Args:
        groups: of four warps, each with a piece.
        width: rows of a tile.

    Raises:
        ValueError: one of them is out of its range.
    """
    if groups not in MULTIPLY_REGISTERS:
        raise ValueError(f"groups {groups}: 1 to 3 are allowed")
    second = parts_of(width)[1]
    if not LEAST_PART <= width <= MOST_WIDTH or second & (second - 1) or 0 < second < LEAST_PART:
        raise ValueError(f"width {width}: 16 to 256, one or two powers of two from 16 on, are allowed")


def stage_bytes(groups: int, width: int) -> int:
    """Shared memory of 64 inputs of a tile's weight rows and rows."""
    return (64 * groups + width) * 128


def stages_of(groups: int, width: int, reserved_bytes: int = 0) -> int:
    """Stages of a ring that shared memory has room for, beside some that is reserved."""
    return min(MOST_STAGES, (SHARED_BYTES - reserved_bytes) // stage_bytes(groups, width))


def rounded(num_rows: int) -> int:
    """Rows for which tiles are chosen."""
    return next(rows for rows in ROWS if rows >= num_rows)


@gluon.constexpr_function
def sums_layout(part: int) -> gl.NVMMADistributedLayout:
    """How registers of four warps hold a piece's sums with `part` columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, part, 16])


@gluon.jit
def halves(acc_OT, PART: gl.constexpr):
    """The left and the right half of a piece's columns, which lie in the same threads' registers."""
    NARROW: gl.constexpr = PART // 2
    left, right = acc_OT.reshape([PIECE, 2, NARROW]).permute(0, 2, 1).split()
    left = gl.convert_layout(left, sums_layout(NARROW), assert_trivial=True)
    right = gl.convert_layout(right, sums_layout(NARROW), assert_trivial=True)
    return left, right
