"""Run by `test_packed_even` in a process of its own: adds up shares of tiles, and prints what is not their sum."""

from __future__ import annotations

import torch

from gemray_kernels.reference.activation import gelu_tanh_and_mul, silu_and_mul
from gemray_kernels.triton.linear import Gate
from gemray_kernels.triton.packed_even_rest import add_rest
from support.kernels.kernel_parity import relative_error
from support.kernels.quick_interpreter import patch_language_once

TOLERANCE = 0.02
"""The interpreter cuts bfloat16 off where a card rounds: up to 2^-8 of a number, four times where there is a gate."""
CASES = [
    # groups, outputs, rows of a tile, rows, results, programs, steps, tiles before, tiles left over, gate
    (2, 128, 32, 29, 4 * 256 - 8, 7, 5, 2, 2, Gate.NONE),
    (3, 64, 48, 48, 2 * 96 - 8, 3, 42, 0, 2, Gate.GELU),
    (2, 64, 32, 17, 5 * 64, 11, 4, 2, 3, Gate.SILU),
    (2, 64, 32, 1, 64, 5, 3, 0, 1, Gate.GELU),
]


def shares(programs: int, steps: int, rest: int) -> dict[int, list[int]]:
    """Slots of the parts of every tile that is left over, by the steps of which they have sums."""
    slots: dict[int, list[int]] = {tile: [] for tile in range(rest)}
    for program in range(programs):
        begin, end = (p * rest * steps // programs for p in (program, program + 1))
        for place, tile in enumerate(sorted({step // steps for step in range(begin, end)})):
            slots[tile].append(2 * program + place)
    return slots


def main() -> None:
    """One line a difference; then how many cases there were."""
    for case in CASES:
        groups, outputs, most_rows, rows, num_out, programs, steps, before, rest, gate = case
        gated = gate is not Gate.NONE
        torch.manual_seed(rows)
        parts = torch.full((2 * programs, groups, outputs, most_rows), torch.nan)
        results = outputs // 2 if gated else outputs
        factor_O = torch.rand(2 * num_out if gated else num_out) + 0.5
        found_TO = torch.full((rows, num_out), torch.nan, dtype=torch.bfloat16)
        first = before * groups * results
        sums = []
        for slots in shares(programs, steps, rest).values():
            total = torch.zeros(groups, outputs, most_rows)
            for slot in slots:
                parts[slot] = torch.randn(groups, outputs, most_rows)
                total += parts[slot]
            sums.append(total)
        sum_OT = torch.cat(sums).view(rest, groups, *((outputs // 16, 2, 8) if gated else (1, 1, outputs)), most_rows)
        add_rest(
            parts.flatten(1),
            factor_O,
            found_TO,
            groups=groups,
            outputs=outputs,
            rows=most_rows,
            programs=programs,
            steps=steps,
            first_tile=before,
            rest=rest,
            gate=gate,
            factor=2.0,
        )
        halves = [sum_OT[:, :, :, g].reshape(-1, most_rows)[: num_out - first, :rows].T for g in range(1 + gated)]
        factors = factor_O.view(1 + gated, num_out)[:, first:]
        scaled = [2.0 * half * factor for half, factor in zip(halves, factors, strict=True)]
        wanted = scaled[0].bfloat16()
        if gated:
            act = gelu_tanh_and_mul if gate is Gate.GELU else silu_and_mul
            wanted = act(torch.cat(scaled, 1).bfloat16())
        if not found_TO[:, :first].isnan().all():
            print(f"{case}: written before the tiles that are left over")
        error = relative_error(found_TO[:, first:], wanted)
        if not error < TOLERANCE:
            print(f"{case}: {error} of the norm away")
    print(f"{len(CASES)} cases")


if __name__ == "__main__":
    patch_language_once()
    main()
