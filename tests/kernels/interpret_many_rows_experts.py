"""Run by `test_many_rows_experts.py` in Triton's interpreter: experts of many rows beside float64, one line a case."""

from __future__ import annotations

from functools import partial

import torch

from gemray_kernels.reference.routing import expert_outputs as reference
from gemray_kernels.triton.expert_tile import ExpertTile
from gemray_kernels.triton.experts import pairs_of_experts
from gemray_kernels.triton.many_rows_experts import expert_outputs

TILES = {
    "small tiles": ExpertTile(16, 16, 16, 4, 2),
    "large tiles": ExpertTile(32, 64, 32, 4, 2),
}
WIDTHS = {"even": (64, 48), "uneven": (72, 40)}
"""Hidden size and width: multiples of the tiles' inputs, or not."""


def routed(rows: int, how: str, generator: torch.Generator) -> torch.Tensor:
    """Two of five experts a row."""
    if how == "one expert idle":
        return torch.stack([1 + torch.randperm(4, generator=generator)[:2] for _ in range(rows)])
    if how == "all the same":
        return torch.tensor([[3, 1]]).repeat(rows, 1)
    return torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(rows)])


def main() -> None:
    """Print the name and relative error of each case."""
    generator = torch.Generator().manual_seed(3)
    normal = partial(torch.randn, generator=generator)
    for sizes, (hidden, width) in WIDTHS.items():
        gate_up, down = normal(5, 2 * width, hidden) * 0.2, normal(5, hidden, width) * 0.2
        for rows, how in ((1, "spread"), (37, "spread"), (70, "one expert idle"), (48, "all the same")):
            numbers = routed(rows, how, generator)
            x = normal(rows, hidden)
            pairs, counts = pairs_of_experts(numbers, 5)
            expected = reference(x.double(), numbers, gate_up.double(), down.double())
            for name, tile in TILES.items():
                got = expert_outputs(x, pairs, counts, gate_up, down, 2, (tile, tile))
                wrong = float((got.double() - expected).norm() / expected.norm())
                print(f"{sizes}, {rows} rows, {how}, {name}", wrong, sep="\t")


if __name__ == "__main__":
    main()
