"""Words of floating-point codes, from which few instructions make numbers.

A register holds two neighbouring words. Each plane's two numbers are masked out of one shift of the register, or out of
the exclusive or of two shifts: no sum of separately masked parts, which takes an instruction for each. The bits that a
mask leaves are then linear in those of the register, and the register for given codes is the solution of 32 equations.

Shape legend: O outputs, B units, C words of a unit, P planes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_REGISTER = (1 << 32) - 1


@dataclass(frozen=True)
class MaskedPlanes:
    """How a register's planes are masked out of it."""

    places: tuple[int, ...]
    """Places of a code's bits, lowest first, in each half of what a mask leaves."""
    planes: tuple[Callable[[int], int], ...]
    """What is masked, as a function of a register that is linear over its bits."""


def _left(register: int, places: int) -> int:
    return register << places & _REGISTER


def _turned(register: int, places: int) -> int:
    return _left(register, places) | register >> 32 - places


MASKED: Mapping[str, MaskedPlanes] = {
    "nvfp4": MaskedPlanes(
        places=(6, 7, 8, 15),
        planes=(
            lambda register: register,
            lambda register: _left(register, 4),
            lambda register: _left(register, 6) ^ _turned(register, 26),
            lambda register: _left(register, 6) ^ register >> 4,
        ),
    ),
    "fp8": MaskedPlanes(
        places=(4, 5, 6, 7, 8, 9, 10, 15),
        planes=(lambda register: register, lambda register: _left(register, 4) ^ register >> 4),
    ),
}
"""Kernels mask what is here (`gemray_kernels.triton.packed_planes`): a sign in a bfloat16 number's, exponent and
mantissa across its lowest bit of the exponent."""


def joined(name: str, codes_OBPC: Tensor) -> Tensor:
    """Words [O, B, C], int32 below 2^16, of the codes of all planes, int32; C is even."""
    table_HPV = _registers_of(name).to(codes_OBPC.device)
    registers = torch.zeros_like(codes_OBPC[:, :, 0, 0::2])
    for half, table_PV in enumerate(table_HPV):
        for plane, table_V in enumerate(table_PV):
            registers ^= table_V[codes_OBPC[:, :, plane, half::2]]
    return torch.stack([registers & 0xFFFF, registers >> 16 & 0xFFFF], dim=-1).flatten(-2)


@lru_cache
def _registers_of(name: str) -> Tensor:
    """For every half, plane and code, int32, the register of which the mask leaves that code alone."""
    masked = MASKED[name]
    bits = len(masked.places)
    sources = _solved([row for plane in masked.planes for row in _rows(plane, masked.places)])

    def register(place: int, code: int) -> int:
        return sum((((code << place) & source).bit_count() & 1) << bit for bit, source in enumerate(sources))

    table = [
        [[register((2 * plane + half) * bits, code) for code in range(1 << bits)] for plane in range(32 // (2 * bits))]
        for half in range(2)
    ]
    return torch.tensor(table, dtype=torch.int64).to(torch.int32)


def _rows(plane: Callable[[int], int], places: Sequence[int]) -> list[int]:
    """Which bits of a register make each masked bit, those of the lower half first."""
    return [
        sum(1 << bit for bit in range(32) if plane(1 << bit) >> (half + place) & 1)
        for half in (0, 16)
        for place in places
    ]


def _solved(rows: Sequence[int]) -> list[int]:
    """Which masked bits make each bit of a register, for which masked bits are made of the bits in `rows`."""
    equations = [(row, 1 << place) for place, row in enumerate(rows)]
    for bit in range(32):
        found = next(i for i in range(bit, 32) if equations[i][0] >> bit & 1)
        equations[bit], equations[found] = equations[found], equations[bit]
        row, made_of = equations[bit]
        for i in range(32):
            if i != bit and equations[i][0] >> bit & 1:
                equations[i] = (equations[i][0] ^ row, equations[i][1] ^ made_of)
    return [made_of for _, made_of in equations]
