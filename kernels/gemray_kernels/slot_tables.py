"""What the choice of a token depends on beside its logits: tables with one entry a slot, and the rows that read them.

The tables keep their addresses, so that a captured graph may read them; only their contents change. A row names its
slot, and all that the host knows of a row is that there is one.

Shape legend: N slots, F numbers of a slot, R rows, V local vocabulary columns, W 32-bit words of V bits, M masks,
B ids (drafts) before a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, unique
from functools import cached_property

import torch
from torch import Tensor

PROMPT_SEEN = 1 << 30
"""Bit of an occurrence count that says: the id is in the prompt. Below it lies the count in the output."""

MIN_TEMPERATURE = 1e-20
"""Smaller positive temperatures are taken as this one, whose noise is already far below any gap between logits:
dividing by them would overflow float32."""

MAX_CANDIDATES = 1024
"""Widest top_k that is served from candidates; a wider one looks for its cut in the whole vocabulary."""


@unique
class Field(IntEnum):
    """Columns of `SlotTables.words_NF`: up to FREQUENCY_PENALTY the bits of a float64, then an int64."""

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3
    REPETITION_PENALTY = 4
    PRESENCE_PENALTY = 5
    FREQUENCY_PENALTY = 6
    SEED = 7
    FREE_FROM = 8
    """First position at which the late mask holds instead of the early one."""
    EARLY_MASK = 9
    LATE_MASK = 10


@dataclass(frozen=True)
class SlotTables:
    """One entry a slot. A table that is None is one that no row needs."""

    words_NF: Tensor
    """int64, by `Field`."""
    masks_MW: Tensor | None
    """int32: bit ``c % 32`` of word ``c // 32`` forbids local column c. Mask 0 forbids nothing."""
    occurrences_NV: Tensor | None
    """int32: how often the output holds each id, and `PROMPT_SEEN`."""
    bias_NV: Tensor | None
    """In the logits' compute dtype, added to them."""

    def without_edits(self) -> SlotTables:
        """The same for logits that are edited already."""
        return replace(self, masks_MW=None, occurrences_NV=None, bias_NV=None)


@dataclass(frozen=True)
class Columns:
    """The ids of a rank's vocabulary columns: two runs of ascending ids, each with padding behind it."""

    ids_V: Tensor
    """int64; -1 in padding."""
    first_id: int
    num_ids: int
    added_column: int
    """Where the second run begins."""
    first_added_id: int
    num_added: int

    def of_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(columns, whether they are here) of ids of any shape; what is not here gets column 0."""
        in_first = (ids >= self.first_id) & (ids < self.first_id + self.num_ids)
        in_added = (ids >= self.first_added_id) & (ids < self.first_added_id + self.num_added)
        added_column = ids - self.first_added_id + self.added_column
        return torch.where(in_first, ids - self.first_id, torch.where(in_added, added_column, 0)), in_first | in_added


@dataclass(frozen=True)
class ChoiceRows:
    """The rows that choose a token."""

    tables: SlotTables
    slot_R: Tensor
    """int64."""
    position_R: Tensor
    """int64: absolute position of the token to be chosen."""
    drafts_RB: Tensor | None = None
    """int64: ids that stand before the row and are not in the counts yet; -1 for none."""

    def without_edits(self) -> ChoiceRows:
        """The same for logits that are edited already."""
        return ChoiceRows(self.tables.without_edits(), self.slot_R, self.position_R)

    def number(self, field: Field) -> Tensor:
        """float64 [R]."""
        return self._numbers[:, field]

    def integer(self, field: Field) -> Tensor:
        """int64 [R]."""
        return self._words[:, field]

    @property
    def temperature(self) -> Tensor:
        """float64 [R]; 0 is greedy."""
        return self.number(Field.TEMPERATURE)

    @cached_property
    def is_greedy(self) -> Tensor:
        """bool [R]."""
        return self.temperature == 0

    @cached_property
    def is_filtered(self) -> Tensor:
        """bool [R]: whether the row is served from candidates because of its top_k."""
        top_k_R = self.number(Field.TOP_K)
        return (top_k_R > 0) & (top_k_R <= MAX_CANDIDATES) & ~self.is_greedy

    def scaled(self, logits_RC: Tensor) -> Tensor:
        """Logits / T."""
        return logits_RC / self.divisor(logits_RC.dtype)[:, None]

    def divisor(self, dtype: torch.dtype) -> Tensor:
        """T as a divisor of logits of `dtype` [R]."""
        return self.temperature.clamp(min=MIN_TEMPERATURE).to(dtype)

    @cached_property
    def _words(self) -> Tensor:
        return self.tables.words_NF[self.slot_R]

    @cached_property
    def _numbers(self) -> Tensor:
        return self._words.view(torch.float64)
