"""Kernels that leave older numbers in the caches of all multiprocessors, and write newer ones as early starts do."""

# Triton looks at annotations: they must not become strings, and a kernel's arguments have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gemray_kernels.triton.early_start import starts_early, wait_for_inputs

PROGRAMS = 132 * 8
BLOCK = 1024
SHARED_NUMBERS = 16384
_SHARED = gl.constexpr(SHARED_NUMBERS)


def read_everywhere(numbers: Tensor) -> Tensor:
    """Have all multiprocessors read int32 numbers into their own caches; the sums of all programs.

    Programs take as much shared memory as attention of wide heads, so that caches need not be cut anew between them.
    """
    sums = torch.empty(PROGRAMS, dtype=torch.int32, device=numbers.device)
    _read_kernel[(PROGRAMS,)](numbers, sums, numbers.numel(), num_warps=4)
    return sums


def write_early(numbers: Tensor, newer: Tensor) -> None:
    """Copy by one program that starts while the kernel before runs, waits, and lets the next one start: an anchor."""
    early = starts_early(numbers)
    _write_kernel[(1,)](numbers, newer, numbers.numel(), BLOCK=BLOCK, EARLY=early, num_warps=4, launch_pdl=early)


def laid_side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """int32 parts in one tensor."""
    return torch.cat([part.flatten() for part in parts])


@gluon.jit(do_not_specialize=["count"])
def _read_kernel(numbers, sums, count, num_warps: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    shared = gl.allocate_shared_memory(gl.int32, [3, _SHARED], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    total = gl.zeros([_SHARED // 32], gl.int32, LAYOUT)
    at = gl.arange(0, _SHARED // 32, LAYOUT)
    for first in range(0, count, _SHARED // 32):
        total += gl.load(numbers + first + at, mask=first + at < count, other=0)
    part = shared.index(0).slice(0, _SHARED // 32)
    part.store(total)
    gl.store(sums + gl.program_id(0), gl.sum(part.load(LAYOUT), 0))


@triton.jit(do_not_specialize=["count"])
def _write_kernel(numbers, newer, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_inputs(EARLY)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(numbers + at, tl.load(newer + at, mask=at < count, other=0), mask=at < count)
