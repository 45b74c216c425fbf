"""All-reduce in one kernel over memory that the ranks' devices write into each other's.

A program owns one block of the tensor. It writes its rank's part into a slot that every peer has for it, tells the
peers, waits for their parts, and adds up all of them, by the tree of `gemray_kernels.numerics` where their number is a
power of two and else in rank order: every rank gets the same bits.

Nobody says that a slot has been read. Each block has two slots a rank, which take turns: at its third turn a rank
overwrites what it wrote at the first one. By then it has waited for its peers' flags of the second turn, which
kernels set that began after those of the first turn had ended. Turns are counted in device memory, a counter a
block, so that a CUDA graph can hold the launch; a flag holds the number of the turn whose part is there.

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

BLOCK_BYTES = 8192
MOST_BYTES = 8 << 20
"""What a rank sends at most; more is left to NCCL. Two H200s take 5.2 us for 10 KiB (NCCL 8.8), 6.7 for 420 KiB (11.4)
and 18.8 for 3.1 MiB (33.2; `benchmarks/results/2026-11-30-h200-all-reduce`)."""
TRIES = 1 << 27
"""How often a program polls for a peer, more than a minute in all; after that its block of the sum is NaN and the
device is free again."""


def blocks_of(size: int) -> int:
    """How many blocks the largest tensor has over `size` ranks: each sends it to every other one."""
    return MOST_BYTES // max(size - 1, 1) // BLOCK_BYTES


def memory_words(size: int) -> int:
    """How many int32 a rank of `size` shares with its peers, zeros at first: two slots for every rank and block, a flag
    for every block and rank, and every block's turns, which only the rank itself reads."""
    return blocks_of(size) * (2 * size * BLOCK_BYTES // 4 + size + 1)


class OneShotReduce:
    """All-reduce of one rank, on one stream."""

    def __init__(self, rank: int, size: int, memory_R: Tensor, keep: object = None) -> None:
        """Reduce over memory that has been laid out.

        Args:
            rank: this one.
            size: how many ranks there are.
            memory_R: int64 addresses of every rank's `memory_words`, as this rank's device sees them.
            keep: what owns that memory.
        """
        self._rank = rank
        self._size = size
        self._blocks = blocks_of(size)
        self._memory_R = memory_R
        self._keep = keep

    def takes(self, x: Tensor) -> bool:
        """Whether `x` is of a dtype that is added here, and small enough to be sent to every other rank."""
        return x.dtype in (torch.bfloat16, torch.float32) and 0 < x.nbytes <= self._blocks * BLOCK_BYTES

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
            self._memory_R,
            out.numel(),
            self._rank,
            PARTS=len(parts),
            SIZE=self._size,
            BLOCKS=self._blocks,
            BLOCK=block,
            TRIES=TRIES,
            EARLY=early,
            num_warps=8,
            launch_pdl=early,
        )
        return out


@triton.jit
def _set(flag, turn):  # type: ignore[no-untyped-def]
    """Set a flag to the number of this turn, once all that this program did before can be seen."""
    tl.atomic_xchg(flag, turn, sem="release", scope="sys")


@triton.jit  # type: ignore[untyped-decorator]
def _came(flag, turn, TRIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until a flag is of this turn or, its setter being ahead, of the next; what its setter did before can be seen
    then. False after TRIES. Turns are compared by their difference, so that their number may overflow."""
    tries = 0
    found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (found - turn < 0) & (tries < TRIES):
        found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        tries += 1
    return found - turn >= 0


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_slots(slot_N, stride, inside_N, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum in float32 of SIZE ranks' slots from `slot_N` on, ever `stride` elements apart."""
    if SIZE == 1:
        result = tl.load(slot_N, mask=inside_N, other=0.0, volatile=True).to(tl.float32)
    else:
        # Two halves of a power of two; of other numbers the last part is added to the sum of those before it.
        FIRST: tl.constexpr = SIZE // 2 if SIZE & (SIZE - 1) == 0 else SIZE - 1
        left = _sum_of_slots(slot_N, stride, inside_N, FIRST)
        result = left + _sum_of_slots(slot_N + FIRST * stride, stride, inside_N, SIZE - FIRST)
    return result


@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def _one_shot_kernel(  # type: ignore[no-untyped-def]
    parts_SN,
    out_N,
    memory_R,
    num_elements,
    rank,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TRIES: tl.constexpr,
    EARLY: tl.constexpr,
):
    block = tl.program_id(0)
    dtype = parts_SN.dtype.element_ty
    at_N = tl.arange(0, BLOCK)
    inside_N = block * BLOCK + at_N < num_elements
    SLOT: tl.constexpr = BLOCKS * BLOCK
    BUFFER_BYTES: tl.constexpr = 2 * SIZE * SLOT * dtype.primitive_bitwidth // 8
    own = tl.load(memory_R + rank)
    own_flags = (own + BUFFER_BYTES).to(tl.pointer_type(tl.int32)) + block * SIZE
    turn_at = (own + BUFFER_BYTES).to(tl.pointer_type(tl.int32)) + BLOCKS * SIZE + block
    wait_for_inputs(EARLY)
    turn = tl.load(turn_at, volatile=True) + 1  # past the L1: of earlier calls there may be a line
    # Slots [2, SIZE, BLOCKS * BLOCK] of a rank: by turn, and by whose part it is.
    slots = (turn & 1) * SIZE * SLOT + block * BLOCK
    part_N = total(parts_SN + block * BLOCK + at_N, num_elements, inside_N, 0.0, PARTS).to(dtype)
    for step in tl.static_range(SIZE):
        peer = (rank + 1 + step) % SIZE  # this rank itself comes last
        to_N = tl.load(memory_R + peer).to(tl.pointer_type(dtype)) + slots + rank * SLOT + at_N
        tl.store(tl.max_contiguous(tl.multiple_of(to_N, 16), BLOCK), part_N, mask=inside_N)
    tl.debug_barrier()  # every thread's part is stored before one thread says so
    for step in tl.static_range(SIZE - 1):
        peer = (rank + 1 + step) % SIZE
        _set((tl.load(memory_R + peer) + BUFFER_BYTES).to(tl.pointer_type(tl.int32)) + block * SIZE + rank, turn)
    all_came = True
    for step in tl.static_range(SIZE - 1):
        all_came = all_came & _came(own_flags + (rank + 1 + step) % SIZE, turn, TRIES)
    tl.debug_barrier()
    slot_N = tl.max_contiguous(tl.multiple_of(own.to(tl.pointer_type(dtype)) + slots + at_N, 16), BLOCK)
    sum_N = _sum_of_slots(slot_N, SLOT, inside_N, SIZE)
    sum_N = tl.where(all_came, sum_N, float("nan"))
    tl.store(out_N + block * BLOCK + at_N, sum_N.to(out_N.dtype.element_ty), mask=inside_N)
    tl.store(turn_at, turn)
