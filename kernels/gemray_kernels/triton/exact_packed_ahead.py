"""Exact products of at most eight rows with packed weights that are asked for before the rows are there.

The kernel is that of `packed_ahead`, whose splits are the leaves here: a leaf's sum is one chain of tile products over
its inputs in order, as in `exact_packed_tree`, over the same numbers, and has its bits.

Shape legend: T rows, I inputs, H inputs of a gated layer, O outputs, S summands.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gemray_kernels.packed_tiles import TiledWeight
from gemray_kernels.packed_weight import Scaling
from gemray_kernels.triton.ahead_tile import AheadTile
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_ahead import launch
from gemray_kernels.triton.packed_ahead import serves as decodes
from gemray_kernels.triton.packed_ring import UNIT_INPUTS


def makes_numbers(weight: TiledWeight) -> bool:
    """Whether kernels whose warps fetch and multiply side by side make a weight's numbers as exact numerics do."""
    return weight.parts > 0 or (weight.code, weight.scaling) == ("int4", Scaling.CODES)


def serves(weight: TiledWeight) -> bool:
    """Whether the kernel makes the weight's numbers, and its leaves end where units do."""
    return makes_numbers(weight) and decodes(weight) and weight.leaf % UNIT_INPUTS == 0


def exact_packed_summands_ahead(
    x_TI: Tensor, weight: TiledWeight, tile: AheadTile, *, out_dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Summands [S, T, O - first] of ``x · weightᵀ``, a leaf each.

    Args:
        x_TI: at most 8 bfloat16 rows, at least one, as `packed_prompts.fits` says.
        weight: that `serves` says yes to, without a leading dimension.
        tile: of this product; its splits are the weight's leaves.
        out_dtype: of the summands; float32 unless there is only one.
        first: outputs that are left out.

    Raises:
        ValueError: rows or a weight that the kernel is not for.
    """
    out_STO = torch.empty(weight.leaves, len(x_TI), weight.num_out - first, dtype=out_dtype, device=x_TI.device)
    _launch(x_TI, weight, first, out_STO, tile, Gate.NONE)
    return out_STO


def exact_packed_gated_ahead(x_TH: Tensor, weight: TiledWeight, tile: AheadTile, gate: Gate) -> Tensor:
    """``act(x · gateᵀ) · (x · upᵀ)`` [T, I] of ``weight = [gate; up]``, rounded as separate kernels round.

    Args:
        x_TH: as for `exact_packed_summands_ahead`.
        weight: likewise, of one leaf.
        tile: of this product.
        gate: GELU or SILU.

    Raises:
        ValueError: as there.
    """
    out_STO = torch.empty(1, len(x_TH), weight.num_out // 2, dtype=x_TH.dtype, device=x_TH.device)
    _launch(x_TH, weight, 0, out_STO, tile, gate)
    return out_STO[0]


def _launch(x_TI: Tensor, weight: TiledWeight, first: int, out_STO: Tensor, tile: AheadTile, gate: Gate) -> None:
    if not serves(weight) or weight.leaves != len(out_STO):
        raise ValueError(
            f"a weight of {weight.code} with {weight.scaling} in {weight.leaves} leaves of {weight.leaf} inputs, with "
            f"{weight.parts} parts of its factors: parts, leaves of whole units of {UNIT_INPUTS} inputs, and one of "
            f"them where they are gated, are allowed"
        )
    launch(x_TI, weight, first, out_STO, replace(tile, splits=weight.leaves), gate, exact=True)
