"""Weights that stay packed in memory: codes of a few bits and the scales that turn them into numbers.

Shape legend: O outputs, I inputs, W words of codes a row, G groups of inputs that share a scale. All may have a leading
dimension of experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

CodeName = Literal["int4", "int8", "fp8", "nvfp4"]


@dataclass(frozen=True)
class Code:
    """How numbers are written in words of memory."""

    name: CodeName
    word: torch.dtype
    per_word: int
    """Numbers a word, the first in its lowest bits."""


INT4 = Code("int4", torch.int32, 8)
"""Eight nibbles an int32, each the number plus 8."""
INT8_PACKED = Code("int8", torch.int32, 4)
"""Four bytes an int32, each the number plus 128."""
INT8 = Code("int8", torch.int8, 1)
FP8 = Code("fp8", torch.float8_e4m3fn, 1)
NVFP4 = Code("nvfp4", torch.uint8, 2)
"""Two e2m1 numbers a byte: a sign above the place in 0, .5, 1, 1.5, 2, 3, 4, 6."""


class Scaling(Enum):
    """Where the scales go."""

    ROW = 0
    """One a row: into the finished sum."""
    CODES = 1
    """Into each number, which is rounded to bfloat16 then."""
    SUMS = 2
    """Into the sum over a unit."""
    EACH = 3
    """Into each number, whose group is found by its place: groups may begin and end anywhere."""


@dataclass(frozen=True)
class Tiling:
    """That kernels lay a weight out anew once it is filled (`gemray_kernels.packed_tiles`), and the room that takes."""

    scaling: Scaling
    code_bytes: int
    """Bytes of a row's codes."""
    scale_bytes: int
    """Bytes of a row's scales."""
    leaves: int = 1
    """Equal parts of the inputs, each of which begins with a unit of its own (`gemray_kernels.numerics`)."""
    words: int = 0
    """Words of a unit; 0 for as many as those of its code have."""


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """One rank's part of a weight; its numbers are ``code · scale``, computed in float32 (docs/quantized.md)."""

    code: Code
    codes_OW: Tensor
    """Words that hold the part's inputs; the first and the last may hold neighbours, too."""
    scale_OG: Tensor
    """Scales of the groups that the part's inputs touch, a row for each output."""
    row_scale_O: Tensor | None
    """A second scale of a row's scales, float32."""
    row_scale_divides: bool
    """Whether scales are divided by it instead of multiplied."""
    group: int
    """Inputs that share a scale."""
    first: int
    """Place of the part's first input among the whole weight's."""
    num_in: int
    tiling: Tiling | None = None
    """None for one that stays as it is."""

    @property
    def num_out(self) -> int:
        """Outputs."""
        return self.codes_OW.shape[-2]

    @property
    def num_experts(self) -> int:
        """Length of the leading dimension."""
        return self.codes_OW.shape[0]

    def rows(self, first: int, length: int | None = None) -> PackedWeight:
        """The outputs from `first` on, all or so many."""
        rows = slice(first, None if length is None else first + length)
        return replace(
            self,
            codes_OW=self.codes_OW[..., rows, :],
            scale_OG=self.scale_OG[..., rows, :],
            row_scale_O=None if self.row_scale_O is None else self.row_scale_O[..., rows],
        )

    def inputs(self, first: int, length: int) -> PackedWeight:
        """The same outputs of `length` inputs from the part's input `first` on."""
        first += self.first
        words, groups = words_of(self.code, first, length), groups_of(self.group, first, length)
        word, group = self.first // self.code.per_word, self.first // self.group
        return replace(
            self,
            codes_OW=self.codes_OW[..., words.start - word : words.stop - word],
            scale_OG=self.scale_OG[..., groups.start - group : groups.stop - group],
            first=first,
            num_in=length,
        )

    def expert(self, number: int) -> PackedWeight:
        """One expert's weight."""
        return replace(
            self,
            codes_OW=self.codes_OW[number],
            scale_OG=self.scale_OG[number],
            row_scale_O=None if self.row_scale_O is None else self.row_scale_O[number],
        )


def words_of(code: Code, first: int, length: int) -> slice:
    """The words of a row that hold `length` numbers from place `first` on."""
    return slice(first // code.per_word, -(-(first + length) // code.per_word))


def groups_of(group: int, first: int, length: int) -> slice:
    """The groups that `length` inputs from place `first` on touch."""
    return slice(first // group, -(-(first + length) // group))
