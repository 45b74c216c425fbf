"""All-reduce of small tensors in one kernel over memory that the ranks' devices read from each other.

A program owns one block of the shared buffers. It waits until its peers have read what it wrote there last time, writes
its part, tells them, waits for theirs, and adds up all parts, by the tree of `gemray_kernels.numerics` where their
number is a power of two and else in rank order: every rank gets the same bits. Each flag is set by one rank and taken
back by another, so nothing counts, and a CUDA graph can hold the launch.

Programs of a block number wait for each other only, and a device starts its programs in order, so that some block can
always go on, however few programs run at a time.

Shape legend: R ranks, S parts of one rank, N elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.triton.early_start import starts_early, wait_for_inputs
from gemray_kernels.triton.parts import total

BLOCK_BYTES = 2048
MOST_BYTES = 1 << 20
"""As much as the shared buffers hold."""
FASTER_BYTES = 1 << 17
"""Larger sums NCCL has ready sooner: with this kernel two H200s take 3% less for a cycle of 31B at one row, 2% less at
8 rows (84 KiB), and 5% more at 32 (`benchmarks/results/2026-11-29-h200-tp2`)."""
BLOCKS = MOST_BYTES // BLOCK_BYTES
TRIES = 1 << 27
"""How often a program polls for a peer, more than a minute in all; after that its block of the sum is NaN and the
device is free again."""


def flag_count(size: int) -> int:
    """How many int32 flags a rank of `size` holds: for every block and peer, whether the peer's part is there, and
    whether the peer has read this rank's. The first half starts as zeros, the second as ones."""
    return 2 * BLOCKS * size


class OneShotReduce:
    """All-reduce of one rank, on one stream."""

    def __init__(self, rank: int, size: int, buffers_R: Tensor, flags_R: Tensor, keep: object = None) -> None:
        """Reduce over memory that has been laid out.

        Args:
            rank: this one.
            size: how many ranks there are.
            buffers_R: int64 addresses of every rank's MOST_BYTES bytes, as this rank's device sees them.
            flags_R: int64 addresses of every rank's `flag_count` flags.
            keep: what owns that memory.
        """
        self._rank = rank
        self._size = size
        self._buffers_R = buffers_R
        self._flags_R = flags_R
        self._keep = keep

    def takes(self, x: Tensor) -> bool:
        """Whether `x` is small enough and of a dtype that is added here."""
        return x.dtype in (torch.bfloat16, torch.float32) and 0 < x.nbytes <= MOST_BYTES

    def is_faster(self, x: Tensor) -> bool:
        """Whether `x` is also so small that this takes less time than NCCL."""
        return self.takes(x) and x.nbytes <= FASTER_BYTES

    def __call__(self, x: Tensor) -> Tensor:
        """The sum over ranks, summed in float32 and rounded once, in new memory; `x` is contiguous."""
        return self.of_parts(x.unsqueeze(0), x.dtype)

    def of_parts(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum [...] over ranks of their parts [S, ...], each rank's own first, rounded once to `dtype`.

        `parts` is contiguous; several of them are a power of two, in float32.
        """
        out = torch.empty_like(parts[0], dtype=dtype)
        block = BLOCK_BYTES // parts.element_size()
        early = starts_early(parts)
        _one_shot_kernel[(triton.cdiv(out.numel(), block),)](
            parts,
            out,
            self._buffers_R,
            self._flags_R,
            out.numel(),
            self._rank,
            PARTS=len(parts),
            SIZE=self._size,
            BLOCKS=BLOCKS,
            BLOCK=block,
            TRIES=TRIES,
            EARLY=early,
            num_warps=4,
            launch_pdl=early,
        )
        return out


@triton.jit
def _set(flag):  # type: ignore[no-untyped-def]
    """Set a flag that is 0, once all that this program did before can be seen."""
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit  # type: ignore[untyped-decorator]
def _take(flag, TRIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until a flag is 1, and set it to 0; what its setter did before can be seen then. Gives 0 after TRIES."""
    tries = 0
    found = tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys")
    while (found != 1) & (tries < TRIES):
        found = tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys")
        tries += 1
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_parts(buffers_R, at_N, inside_N, dtype, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum in float32 of the parts of PARTS ranks from the first of `buffers_R` on."""
    if PARTS == 1:
        part_N = tl.load(buffers_R).to(tl.pointer_type(dtype)) + at_N
        result = tl.load(part_N, mask=inside_N, other=0.0, volatile=True).to(tl.float32)
    else:
        # Two halves of a power of two; of other numbers the last part is added to the sum of those before it.
        FIRST: tl.constexpr = PARTS // 2 if PARTS & (PARTS - 1) == 0 else PARTS - 1
        left = _sum_of_parts(buffers_R, at_N, inside_N, dtype, FIRST)
        result = left + _sum_of_parts(buffers_R + FIRST, at_N, inside_N, dtype, PARTS - FIRST)
    return result


@triton.jit(do_not_specialize=["num_elements", "rank"])  # type: ignore[untyped-decorator]
def _one_shot_kernel(  # type: ignore[no-untyped-def]
    parts_SN,
    out_N,
    buffers_R,
    flags_R,
    num_elements,
    rank,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TRIES: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    block = tl.program_id(0)
    dtype = parts_SN.dtype.element_ty
    at_N = block * BLOCK + tl.arange(0, BLOCK)
    inside_N = at_N < num_elements
    own_flags = tl.load(flags_R + rank).to(tl.pointer_type(tl.int32)) + block * SIZE
    all_came = 1
    for peer in tl.static_range(SIZE):
        if peer != rank:
            all_came = all_came & _take(own_flags + BLOCKS * SIZE + peer, TRIES)
    own_N = tl.load(buffers_R + rank).to(tl.pointer_type(dtype)) + at_N
    tl.store(own_N, total(parts_SN + at_N, num_elements, inside_N, 0.0, PARTS).to(dtype), mask=inside_N)
    tl.debug_barrier()  # every thread's part is stored before one thread says so
    for peer in tl.static_range(SIZE):
        if peer != rank:
            _set(tl.load(flags_R + peer).to(tl.pointer_type(tl.int32)) + block * SIZE + rank)
    for peer in tl.static_range(SIZE):
        if peer != rank:
            all_came = all_came & _take(own_flags + peer, TRIES)
    tl.debug_barrier()
    sum_N = _sum_of_parts(buffers_R, at_N, inside_N, dtype, SIZE)
    sum_N = tl.where(tl.full([BLOCK], all_came, tl.int32) == 1, sum_N, float("nan"))
    tl.store(out_N + at_N, sum_N.to(out_N.dtype.element_ty), mask=inside_N)
    tl.debug_barrier()  # every thread has read before one thread says so
    for peer in tl.static_range(SIZE):
        if peer != rank:
            _set(tl.load(flags_R + peer).to(tl.pointer_type(tl.int32)) + BLOCKS * SIZE + block * SIZE + rank)
