"""How much one program of the experts' products holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertTile:
    """Pairs, outputs and inputs of one program's product."""

    pairs: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    weight_first: bool = False
    """The weight is the left operand of the tile product; only exact numerics' second product asks."""
