"""Tiles of 26B-A4B's experts for the rows of a prompt, beside the kernels that decoding takes.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python -m prefill_experts [--rows 512,2048,4096]

Rows choose eight of 128 experts at random. Each tile of either product is timed with the served tile of the other one,
and checked against float64 on a few rows. About a minute on a card.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from decode_kernels.experts import expected_output
from decode_kernels.measure import Report, error, in_words, median_us, poisoned, random
from gemray_kernels.table import REFERENCE
from gemray_kernels.triton import experts, many_rows_experts
from gemray_kernels.triton.expert_tile import ExpertTile

EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2816, 704
UPS = (
    (16, 32, 128, 4, 4),
    (16, 64, 64, 4, 4),
    (32, 64, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (64, 128, 64, 4, 3),
    (64, 128, 64, 8, 4),
    (128, 64, 64, 4, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 32, 8, 6),
    (128, 128, 64, 16, 4),
)
DOWNS = (
    (16, 64, 64, 4, 4),
    (32, 128, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 256, 64, 8, 4),
    (128, 128, 64, 4, 3),
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 256, 32, 8, 6),
    (128, 256, 64, 16, 4),
)
CHECKED_ROWS = 5
SMALL = 32
"""Pairs of a tile below which it is for few rows."""


def main() -> None:
    """Print a line for each number of rows; exit with 1 where a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="4096,2048,512,1024,256,64")
    parser.add_argument("--time-limit", type=float, default=80.0, help="seconds after which no other rows are begun")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report, until = Report(), time.monotonic() + arguments.time_limit
    gate_up, down = random(EXPERTS, 2 * WIDTH, HIDDEN, gain=0.02), random(EXPERTS, HIDDEN, WIDTH, gain=0.04)
    with torch.inference_mode():
        for rows in map(int, arguments.rows.split(",")):
            if time.monotonic() < until:
                sweep(report, rows, gate_up, down)
    sys.exit(1 if report.faults else 0)


def sweep(report: Report, rows: int, gate_up: Tensor, down: Tensor) -> None:
    """Time all tiles that suit a number of rows."""
    x = random(rows, HIDDEN)
    _, numbers = REFERENCE.route(random(1, rows, EXPERTS, dtype=torch.float32), random(EXPERTS), TOP_K)
    pairs, counts = experts.pairs_of_experts(numbers, EXPERTS)
    listing = median_us([partial(experts.pairs_of_experts, numbers, EXPERTS)] * 4)
    with mock.patch.object(experts, "MANY_ROWS", 1 << 30):
        before = median_us([partial(experts.expert_outputs, x, numbers, gate_up, down)] * 4)
    call = partial(many_rows_experts.expert_outputs, x, pairs, counts, gate_up, down, TOP_K)
    served = many_rows_experts.tiles_for(torch.bfloat16, rows)
    found = {"served": median_us([call] * 4)}
    with mock.patch.object(many_rows_experts, "least_pairs", lambda tile: tile.pairs):
        found["served, whole last blocks"] = median_us([call] * 4)
    fits = (lambda tile: tile[0] <= 64) if rows <= 256 else (lambda tile: tile[0] > SMALL)
    tiles = {f"up {u}": (ExpertTile(*u), served[1]) for u in UPS if fits(u)}
    tiles |= {f"down {d}": (served[0], ExpertTile(*d)) for d in DOWNS if fits(d)}
    for name, pair in tiles.items():
        try:
            found[name] = median_us([partial(call, pair)] * 4)
            check(report, f"{rows} rows, {name}", partial(call, pair), x, numbers, gate_up, down)
        except Exception as reason:  # a sweep may contain tiles that do not fit
            report.refused(pair, reason)
    operations = 2 * rows * TOP_K * 3 * HIDDEN * WIDTH
    report.row(
        "experts",
        f"{rows} rows: before {before:.0f} us ({operations / before / 1e6:.0f} TFLOP/s), listing {listing:.0f}, "
        f"most rows of an expert {int(counts.max())}; {in_words(found)}; "
        f"best {operations / min(found.values()) / 1e6:.0f} TFLOP/s",
        rows=rows,
        before=before,
        listing=listing,
        found=found,
    )


def check(
    report: Report, name: str, call: partial[Tensor], x: Tensor, numbers: Tensor, gate_up: Tensor, down: Tensor
) -> None:
    """Compare some rows with float64."""
    with poisoned():
        got = call()
    for row in torch.linspace(0, len(x) - 1, CHECKED_ROWS).long().tolist():
        expected = torch.stack([expected_output(x[row], gate_up[e], down[e]) for e in numbers[row].tolist()])
        if not (wrong := error(got[row], expected)) < 1e-2:
            report.fault(f"{name}: error {wrong} in row {row}")
            return


if __name__ == "__main__":
    main()
