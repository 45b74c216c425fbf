"""Tiles of the two products of 26B-A4B's experts at few rows, and the router."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from decode_kernels.measure import CEILING, Report, early, error, in_words, median_us, poisoned, random
from gemray_kernels.reference import activation
from gemray_kernels.table import REFERENCE, triton_kernels
from gemray_kernels.triton import few_rows_experts, routing
from gemray_kernels.triton.expert_tile import ExpertTile

UPS = (
    (16, 256, 4, 4),
    (16, 256, 4, 6),
    (16, 512, 4, 3),
    (32, 128, 4, 4),
    (32, 128, 4, 6),
    (32, 256, 4, 3),
    (64, 128, 4, 3),
)
DOWNS = (
    (32, 64, 4, 8),
    (64, 64, 4, 6),
    (64, 64, 4, 8),
    (128, 64, 4, 5),
    (32, 128, 4, 5),
    (64, 128, 4, 4),
    (16, 256, 4, 4),
)

Rows = tuple[Tensor, Tensor, Tensor]
"""Inputs, weights of the chosen experts, and their numbers."""


def experts(report: Report) -> None:
    """Sweep tiles at some numbers of rows; then time the router."""
    gate_up, down = random(128, 1408, 2816, gain=0.02), random(128, 2816, 704, gain=0.04)
    for rows in (1, 5, 8, 16):
        sweep(report, rows, gate_up, down)
    for rows in (1, 8):
        logits = [random(4, rows, 128, dtype=torch.float32) for _ in range(8)]
        scale = random(128)
        found = median_us([partial(routing.route, x, scale, 8) for x in logits])
        report.row("route", f"route, {rows} rows: {found:.1f}", rows=rows, found=found)


def sweep(report: Report, rows: int, gate_up: Tensor, down: Tensor) -> None:
    """Time the tiles at one number of rows, and check the kernel's own."""
    sets: list[Rows] = []
    for _ in range(8):
        weights, numbers = REFERENCE.route(random(1, rows, 128, dtype=torch.float32), random(128), 8)
        sets.append((random(rows, 2816), weights, numbers))
    touched = statistics.mean(len(numbers.unique()) for _, _, numbers in sets)
    floor = touched * 3 * 704 * 2816 * 2 / CEILING * 1e6
    before = median_us([partial(list_path, x, w, n, gate_up, down) for x, w, n in sets])
    up, dn = few_rows_experts.tiles_for(torch.bfloat16)
    tiles = {f"up {u}": (ExpertTile(16, *u), dn) for u in UPS} | {f"down {d}": (up, ExpertTile(16, *d)) for d in DOWNS}
    found = {}
    with early(False):
        for name, pair in tiles.items():
            try:
                found[name] = outputs_us(sets, gate_up, down, pair)
            except Exception as reason:
                report.refused(pair, reason)
    with early(True):
        ahead = outputs_us(sets, gate_up, down)
    check(report, sets[0], gate_up, down)
    report.row(
        "experts",
        f"experts, {rows} rows, {touched:.0f} touched: floor {floor:.1f}, before {before:.1f}, early {ahead:.1f}; "
        f"{in_words(found, 14)}",
        rows=rows,
        floor=floor,
        before=before,
        found=found,
        early=ahead,
    )


def outputs_us(sets: Sequence[Rows], gate_up: Tensor, down: Tensor, *tiles: tuple[ExpertTile, ExpertTile]) -> float:
    """Microseconds of the chosen experts' outputs, in tiles or in the kernel's own."""
    return median_us([partial(few_rows_experts.expert_outputs, x, n, gate_up, down, *tiles) for x, _, n in sets])


def list_path(x: Tensor, w: Tensor, n: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The kernels that list each expert's rows first."""
    with mock.patch.object(few_rows_experts, "MOST_ROWS", 0):
        return triton_kernels().gated_experts(x, w, n, gate_up, down)


def check(report: Report, rows: Rows, gate_up: Tensor, down: Tensor) -> None:
    """Compare with float64."""
    x, _, n = rows
    with poisoned():
        got = few_rows_experts.expert_outputs(x, n, gate_up, down)
    expected = torch.stack(
        [
            torch.stack([expected_output(x[t], gate_up[e], down[e]) for e in chosen])
            for t, chosen in enumerate(n.tolist())
        ]
    )
    if not (wrong := error(got, expected)) < 1e-2:
        report.fault(f"experts at {len(x)} rows: error {wrong}")


def expected_output(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert's output for one row, in float64."""
    return activation.gelu_tanh_and_mul(x.double() @ gate_up.double().t()) @ down.double().t()
