"""Attention of few rows of each sequence behind a window, for sm_90: all keys of a sequence and KV head in one program.

A window bounds a sequence's keys, so a batch whose sequences and KV heads keep the device at work needs no parts of
keys, nor a kernel that adds them up (`whole_kernel`). Rows are those of decode and verify
steps, or a drafter's block.

A row's bits depend on its sequence, and on the batch by what `serves_whole` asks and how many pairs a program has: on
numbers of rows and sequences, never on what other sequences hold.

Shape legend: T rows of all sequences together, S sequences, Z = S + 1 bounds, P block-table columns, N query heads,
D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gemray_kernels.reference.paged_attention import FEW_ROWS
from gemray_kernels.triton.early_start import on_hopper, starts_early
from gemray_kernels.triton.gluon_ring import swizzled
from gemray_kernels.triton.linear_tiles import MULTIPROCESSORS
from gemray_kernels.triton.whole_kernel import PAGE_SIZE, PIECE, WholeShape, attend_whole_kernel

LOG2_E = log2(e)
SMALL_HEAD = 128
"""A drafter's head dim: half the sums."""
FEW_PAIRS, MANY_PAIRS, SMALL_HEADS_PAIRS = 16, 32, 64
"""Pairs of a program; the last of small heads alone."""


@dataclass(frozen=True)
class Room:
    """What a program has of its multiprocessor."""

    stages: int
    """Units of the ring."""
    ahead: int
    """Tiles that are fetched before the queries are there; the ring has room for them."""
    most_registers: int | None
    """Registers of a thread on average, if the compiler is to be held to fewer than it takes."""


ALONE = Room(12, 2, None)
SHARED = {FEW_PAIRS: Room(6, 1, 128), MANY_PAIRS: Room(5, 1, 128), SMALL_HEADS_PAIRS: ALONE}
"""By pairs, where there are more programs than multiprocessors: two share one, but where a thread would have too many
sums."""
FETCH_REGISTERS = 24
"""Registers of a thread that fetches."""
LEAST_PROGRAMS = 33
"""Fewer than these leave so much of the device idle that keys are better cut into parts (`paged_attention`)."""


def serves_whole(
    q_TND: Tensor, k_pages: Tensor, v_pages: Tensor, num_seqs: int, *, window: int, causal: bool, most_rows: int
) -> bool:
    """Whether `attend_whole` takes such a call: few rows of each sequence, of enough sequences and KV heads.

    Args:
        q_TND: queries.
        k_pages: pages of keys.
        v_pages: those of values, which lie alike.
        num_seqs: sequences, the null slot among them.
        window: keys a query sees.
        causal: whether keys behind a query are hidden.
        most_rows: rows of a sequence that sees keys, at most.
    """
    num_heads, head_dim = q_TND.shape[1:]
    page_size, num_kv_heads = k_pages.shape[1:3]
    group = num_heads // num_kv_heads
    return (
        on_hopper(q_TND)
        and q_TND.dtype == k_pages.dtype == torch.bfloat16
        and head_dim in (SMALL_HEAD, 256)
        and page_size == PAGE_SIZE.value
        and window > page_size
        and group in (1, 2, 4, 8, 16)
        and most_rows <= FEW_ROWS
        and num_seqs * num_kv_heads * _blocks(q_TND, num_kv_heads, num_seqs)[1] >= LEAST_PROGRAMS
        and all(x.data_ptr() % 16 == 0 for x in (q_TND, k_pages, v_pages))
        and all(stride % 8 == 0 for stride in (*q_TND.stride()[:2], *k_pages.stride()[:3]))
    )


def attend_whole(
    q_TND: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table_SP: Tensor,
    query_start_Z: Tensor,
    kv_len_S: Tensor,
    out_TND: Tensor,
    *,
    window: int,
    causal: bool,
    scale: float,
) -> None:
    """Attend with all rows.

    Lengths, tables and keys of earlier steps are read before the kernel before has ended.

    Args:
        q_TND: as all tensors before `out_TND`, of `paged_attention`, for which `serves_whole` holds.
        out_TND: takes the result.
        window: keys a query sees.
        causal: whether keys behind a query are hidden.
        scale: multiplies the scores.
    """
    num_heads, head_dim = q_TND.shape[1:]
    num_kv_heads = k_pages.shape[2]
    group = num_heads // num_kv_heads
    pairs, blocks = _blocks(q_TND, num_kv_heads, len(kv_len_S))
    programs = len(kv_len_S) * num_kv_heads
    # The null slot, which is one of the sequences, leaves its programs nothing to do.
    room = ALONE if (programs - num_kv_heads) * blocks <= MULTIPROCESSORS else SHARED[pairs]
    shape = WholeShape(num_heads, group, head_dim, window, causal, pairs, room.stages)
    early = starts_early(q_TND)
    attend_whole_kernel[(programs, blocks)](
        TensorDescriptor.from_tensor(q_TND, [shape.rows, group, PIECE.value], swizzled(128, rank=3)),
        *(
            TensorDescriptor.from_tensor(pages, [1, PAGE_SIZE.value, 1, PIECE.value], swizzled(128, rank=4))
            for pages in (k_pages, v_pages)
        ),
        block_table_SP,
        query_start_Z,
        kv_len_S,
        out_TND,
        len(k_pages),
        block_table_SP.stride(0),
        scale * LOG2_E,
        SHAPE=shape,
        EARLY=early,
        AHEAD=room.ahead,
        FETCH_REGISTERS=FETCH_REGISTERS,
        launch_pdl=early,
        num_warps=4,
        **({} if room.most_registers is None else {"maxnreg": room.most_registers}),
    )


def _blocks(q_TND: Tensor, num_kv_heads: int, num_seqs: int) -> tuple[int, int]:
    """Pairs of a program, and programs of a sequence and KV head: enough for as many rows as a sequence has on average,
    the null slot left out. Of one that has more, programs attend several blocks of rows, one after the other.

    A drafter's blocks of any number of rows share programs, so that steps of some of them compile none.
    """
    num_rows, num_heads, head_dim = q_TND.shape
    others = max(1, num_seqs - 1)
    pairs = num_heads // num_kv_heads * min(-(-num_rows // others), FEW_ROWS)
    if head_dim > SMALL_HEAD:
        most = FEW_PAIRS if pairs <= FEW_PAIRS else MANY_PAIRS
    else:
        most = MANY_PAIRS if others * num_kv_heads <= MULTIPROCESSORS else SMALL_HEADS_PAIRS
    return most, -(-pairs // most)
