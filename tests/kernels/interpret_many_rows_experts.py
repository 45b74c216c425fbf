"""Run by `test_many_rows_experts.py` in Triton's interpreter: experts of many rows beside float64, one line a case."""

from __future__ import annotations

from functools import partial

import torch

from gemray_kernels.reference.routing import expert_outputs as reference
from gemray_kernels.triton.expert_tile import ExpertTile
from gemray_kernels.triton.experts import pairs_of_experts
from gemray_kernels.triton.many_rows_experts import expert_outputs
from support.kernels.quick_interpreter import patch_language_once

TILES = {
    "small tiles": ExpertTile(16, 16, 16, 4, 2),
    "large tiles": ExpertTile(32, 64, 32, 4, 2),
    "halved tiles": ExpertTile(128, 32, 32, 8, 2),
}
CASES = ((1, "spread"), (37, "spread"), (70, "one expert idle"), (65, "all the same"), (150, "all the same"))
"""Rows, and how they choose: experts of fewer than 65, of 65 and of 150 rows take half a large tile, one, and one and a
half."""
WIDTHS = {"even": (64, 48), "uneven": (72, 40)}
"""Hidden size and width: multiples of the tiles' inputs, or not. Cases and tiles have them in turn."""


def routed(rows: int, how: str, generator: torch.Generator) -> torch.Tensor:
    """Two of five experts a row."""
    if how == "one expert idle":
        return torch.stack([1 + torch.randperm(4, generator=generator)[:2] for _ in range(rows)])
    if how == "all the same":
        return torch.tensor([[3, 1]]).repeat(rows, 1)
    return torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(rows)])


def main() -> None:
    """Print the name and relative error of each case."""
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN: an output that is not written shows
    generator = torch.Generator().manual_seed(3)
    normal = partial(torch.randn, generator=generator)
    for turn, (sizes, (hidden, width)) in enumerate(WIDTHS.items()):
        gate_up, down = normal(5, 2 * width, hidden) * 0.2, normal(5, hidden, width) * 0.2
        for index, (rows, how) in enumerate(CASES):
            numbers = routed(rows, how, generator)
            x = normal(rows, hidden)
            pairs, counts = pairs_of_experts(numbers, 5)
            expected = reference(x.double(), numbers, gate_up.double(), down.double())
            for name, tile in list(TILES.items())[(index + turn) % 2 :: 2]:
                got = expert_outputs(x, pairs, counts, gate_up, down, 2, (tile, tile))
                wrong = float((got.double() - expected).norm() / expected.norm())
                print(f"{sizes}, {rows} rows, {how}, {name}", wrong, sep="\t")


if __name__ == "__main__":
    patch_language_once()
    main()
