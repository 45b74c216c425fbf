"""What one forward pass computes: ragged rows of several sequences, with where their keys lie.

Shape legend: T rows of all sequences together, U of them whose output is used, S sequences, Z = S + 1 bounds, P
block-table columns, H hidden size, F captured layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GroupMetadata:
    """Where one KV group keeps the keys of this batch."""

    block_table_SP: Tensor
    """int32: page of position p of sequence s is ``block_table[s, p // page_size]``. Unused entries are 0,
    the null page, which no sequence owns."""
    kv_index_T: Tensor
    """int64: where row t's K and V go, ``page * page_size + offset``. Rows that write nothing have an index < page_size
    (the null page)."""


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one forward pass.

    Row i of sequence s (i counted from ``query_start_Z[s]``) attends as the query at position
    ``kv_len_S[s] - n_s + i``, where n_s is the sequence's number of rows: masks are aligned to the last key.
    `positions_T` is for RoPE alone; the two agree everywhere but in an MTP draft step.
    """

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, absolute."""
    query_start_Z: Tensor
    """int32 [S + 1], cumulative rows."""
    kv_len_S: Tensor
    """int32: keys of each sequence once this batch's rows are written."""
    groups: Mapping[str, GroupMetadata]
    """By KV group name."""
    most_rows: int | None = None
    """Rows of a sequence that sees keys, at most, as far as the host knows."""
    most_keys: int | None = None
    """Keys of a sequence of a prompt chunk's many rows, at most, as far as the host knows."""


@dataclass(frozen=True)
class OutputRows:
    """The rows of a forward pass whose output is used: of each sequence the last ones."""

    place_U: Tensor
    """int64: their indices into T."""
    batch: ForwardBatch
    """The same rows as a pass of their own, which writes no keys."""


@dataclass(frozen=True)
class ForwardOutput:
    """What the target model gives back."""

    hidden_UH: Tensor
    """Post-final-norm hidden states: the input of the lm_head. Of the pass's `OutputRows`, or of all its rows."""
    captured_TFH: Tensor | None
    """Residual stream after each captured layer (after layer_scalar), or None when nothing is captured."""
