"""From token ids to a model's first hidden states: lookups in tables that are split over ranks (spec 1.1 and 1.8).

Shape legend: T rows, H width of a table, V local rows of it, S summands, L layers, P width of a per-layer embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.reference.layer_norms import Norm, total
from gemray_kernels.slot_tables import Columns


def embed(
    token_ids_T: Tensor, table_VH: Tensor, columns: Columns, scale: float, vocab_size: int | None = None
) -> Tensor:
    """``table[id] · scale`` [T, H] of the ids that this rank holds, zeros for the others.

    Args:
        token_ids_T: int64.
        table_VH: a row for each of `columns`.
        columns: which ids are here.
        scale: multiplies in the table's dtype.
        vocab_size: ids outside ``0 <= id < vocab_size`` are read as 0; None where there are no such ids.
    """
    if vocab_size is not None:
        token_ids_T = torch.where((token_ids_T >= 0) & (token_ids_T < vocab_size), token_ids_T, 0)
    rows_T, is_here_T = columns.of_ids(token_ids_T)
    return (table_VH[rows_T] * scale).masked_fill(~is_here_T.unsqueeze(-1), 0)


def per_layer_inputs(context_STO: Tensor, tokens_TO: Tensor, norm: Norm, context_scale: float) -> Tensor:
    """``(norm(Σ context · context_scale) + tokens) · 2^(-1/2)`` [T, L, P], rounded where separate operations round.

    Args:
        context_STO: parts of the projection of the token embeddings, added as `total` adds and rounded; O = L P.
        tokens_TO: scaled per-layer embeddings of the tokens.
        norm: over the P of each layer.
        context_scale: of the projection.
    """
    context_TO = total(context_STO, tokens_TO.dtype) * context_scale
    context_TLP = context_TO.view(len(tokens_TO), -1, len(norm.weight_D))
    return (norm(context_TLP) + tokens_TO.view_as(context_TLP)) * 2**-0.5
