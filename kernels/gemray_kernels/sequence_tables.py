"""What the device knows of the sequences that hold slots, and the rows that a cycle lays out from it.

The tables keep their addresses, so that a captured graph may read them; only their contents change. The last slot is
the null slot: it has no token computed, its end is 0, its pages are the null page, and it takes rows and pages that
belong to no sequence.

Shape legend: N slots, L token columns, A sequences of a cycle and the null slot behind them, T rows, G KV groups,
P block-table columns of a group, R x Q a rectangle of rows, D sequences that draft, K most drafts of one, Z bounds of
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, unique

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceTables:
    """One entry a slot."""

    token_ids_NL: Tensor
    """int64: the tokens that are known, and drafts behind them."""
    computed_N: Tensor
    """int64: tokens whose KV is valid."""
    end_N: Tensor
    """int64: tokens that the sequence has at its end, at most."""

    @property
    def null_slot(self) -> int:
        """The last one."""
        return len(self.computed_N) - 1


@dataclass(frozen=True)
class PagePlace:
    """Where a KV group's block table lies."""

    first_cell: int
    width: int
    """P."""
    page_size: int


@dataclass(frozen=True)
class PageTables:
    """The block tables of some KV groups, which lie one behind the other in one tensor."""

    pages: Tensor
    """int32, flat: every group's [N, P], other groups' among them."""
    places: tuple[PagePlace, ...]
    """By group."""
    places_G4: Tensor
    """int64, the same on the device: first cell, P, page size, and the sum of the P before."""

    @classmethod
    def of(cls, pages: Tensor, places: Sequence[PagePlace]) -> PageTables:
        """Copy the places to the device of the pages."""
        before = [sum(place.width for place in places[:i]) for i in range(len(places))]
        rows = [(p.first_cell, p.width, p.page_size, b) for p, b in zip(places, before, strict=True)]
        places_G4 = torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(pages.device)
        return cls(pages, tuple(places), places_G4)

    def table(self, group: int, num_slots: int) -> Tensor:
        """A group's block table [N, P]."""
        place = self.places[group]
        cells = self.pages[place.first_cell : place.first_cell + num_slots * place.width]
        return cells.view(num_slots, place.width)


@unique
class CutField(IntEnum):
    """Rows of the int64 [5, A] that `cut_rows` makes: what is left of what each sequence was granted."""

    SLOT = 0
    START = 1
    """Tokens computed before the cycle: position of the first row."""
    KNOWN = 2
    """Rows of tokens that are decided; 0 where the sequence has reached its end."""
    DRAFTS = 3
    """Rows of drafts behind them; as many as could still be emitted, at most."""
    CHOOSES = 4
    """1 where the sequence chooses a token, else 0."""


@dataclass(frozen=True)
class RowLayout:
    """Rows of several sequences one behind the other, and where they lie in every KV group."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64; 0 in rows of the null slot."""
    sequence_T: Tensor
    """int64: index into A."""
    offset_T: Tensor
    """int64: of a row within its sequence."""
    first_A: Tensor
    """int64: index into T of each sequence's first row."""
    query_start_Z: Tensor
    """int32: cumulative rows."""
    kv_len_A: Tensor
    """int32: keys of each sequence once the rows are written."""
    kv_index_GT: Tensor
    """int64: where each row's keys go, ``page * page_size + offset``."""
    block_tables: tuple[Tensor, ...]
    """int32 [A, P] by group."""
    slot_RQ: Tensor
    """int64, of the rectangle."""
    position_RQ: Tensor
    """int64: where the token that a row chooses will stand."""
    row_RQ: Tensor
    """int64: index into T."""


@dataclass(frozen=True)
class QueryLayout:
    """One query a sequence, over its committed keys."""

    slot_D: Tensor
    """int64; the null slot for a sequence that has no room for a draft."""
    token_ids_D: Tensor
    """int64: each sequence's newest token."""
    positions_D: Tensor
    """int64, for RoPE."""
    query_start_Z: Tensor
    """int32, cumulative."""
    kv_len_D: Tensor
    """int32."""
    nothing_written_D: Tensor
    """int64 zeros: as KV indices, the null page."""
    block_tables: tuple[Tensor, ...]
    """int32 [D, P] by group."""
    draft_position_KD: Tensor
    """int64: where each draft will stand."""


@dataclass(frozen=True)
class Settled:
    """What a cycle has decided."""

    accepted_A: Tensor
    """int64: drafts that now stand for good."""
    ids_RQ: Tensor
    """int64: emitted ids, then -1."""
    found: Tensor
    """int64 [R, 2 + Q]: drafts verified, drafts accepted, then the emitted ids; `NOTHING` where nothing was chosen."""


NOTHING = -2
"""In the place of a first id where a sequence had reached its end before the cycle; -1 there says unusable logits."""
