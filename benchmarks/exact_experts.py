"""Times 26B-A4B's experts in exact numerics beside those in fast ones, and sweeps tiles of the product that differs.

    PYTHONPATH=kernels:workers:benchmarks python benchmarks/exact_experts.py

A row is the median of replays of a CUDA graph over several inputs (`decode_kernels.measure`); rows choose their experts
independently. The first product of an expert is the same kernel in both numerics; the second is cut into leaves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
from torch import Tensor

from decode_kernels.measure import in_words, median_us, random
from gemray_kernels.table import REFERENCE
from gemray_kernels.triton import exact_experts, experts
from gemray_kernels.triton.expert_tile import ExpertTile

NUM_EXPERTS, TOP_K, HIDDEN, WIDTH, LEAVES = 128, 8, 2816, 704, 8
TILES: dict[int, Sequence[tuple[int, ...]]] = {
    256: (
        (16, 32, 64, 4, 4, False),
        (16, 64, 64, 4, 2, False),
        (16, 64, 64, 4, 3, False),
        (16, 64, 64, 4, 3, True),
        (16, 128, 64, 8, 2, True),
    ),
    8192: (
        (16, 64, 64, 4, 3, False),
        (32, 64, 64, 4, 3, True),
        (32, 128, 64, 8, 3, True),
        (64, 64, 64, 4, 2, False),
        (64, 128, 64, 8, 2, True),
        (64, 128, 64, 8, 3, True),
        (128, 32, 64, 8, 2, False),
        (128, 64, 64, 8, 3, False),
    ),
}
"""Pairs, outputs, inputs, warps, stages and whether the weight is first, by the most rows that take them."""

Rows = tuple[Tensor, Tensor]
"""Inputs, and the numbers of the chosen experts."""


def main() -> None:
    """Print a line a number of rows."""
    gate_up = random(NUM_EXPERTS, 2 * WIDTH, HIDDEN, gain=0.02)
    down = random(NUM_EXPERTS, HIDDEN, WIDTH, gain=0.04)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds")
    for rows in (1, 8, 16, 32, 128, 512, 2048, 8192):
        sets = [rows_of(rows) for _ in range(8 if rows <= 512 else 2)]
        touched = statistics.mean(len(chosen.unique()) for _, chosen in sets)
        fast = time_of(experts.expert_outputs, sets, gate_up, down)
        exact = time_of(exact_experts.expert_outputs, sets, gate_up, down, LEAVES)
        unrounded = time_of(exact_experts.expert_subtrees, sets, gate_up, down, LEAVES)
        halves = (gate_up[:, : gate_up.shape[1] // 2].contiguous(), down[..., : WIDTH // 2].contiguous())
        half = time_of(exact_experts.expert_subtrees, sets, *halves, LEAVES // 2)
        half_fast = time_of(experts.expert_outputs, sets, *halves)
        print(
            f"{rows} rows, {touched:.0f} experts: fast {fast:.1f}, exact {exact:.1f} ({exact / fast - 1:+.1%}), "
            f"float32 {unrounded:.1f}; a rank of 2: fast {half_fast:.1f}, exact {half:.1f}",
            flush=True,
        )
        tiles = next(tiles for most, tiles in TILES.items() if rows <= most)
        found = {}
        for tile in tiles:
            if rows > 16 or tile[0] == 16:  # a program of few rows holds 16 pairs
                pairs, outputs, inputs, warps, stages, weight_first = tile
                choice = ExpertTile(pairs, outputs, inputs, warps, stages, weight_first=bool(weight_first))
                try:
                    found[str(tile)] = time_of(exact_experts.expert_outputs, sets, gate_up, down, LEAVES, choice)
                except triton.OutOfResources as reason:
                    print(f"    {tile}: {reason}", flush=True)
        print("    " + in_words(found), flush=True)


def rows_of(count: int) -> Rows:
    """Random rows and their experts."""
    _, chosen = REFERENCE.route(random(1, count, NUM_EXPERTS, dtype=torch.float32), random(NUM_EXPERTS), TOP_K)
    return random(count, HIDDEN), chosen


def time_of(outputs: Callable[..., object], sets: Sequence[Rows], *others: object) -> float:
    """Microseconds of one call."""
    return median_us([partial(outputs, x, chosen, *others) for x, chosen in sets])


if __name__ == "__main__":
    main()
