"""Run by `test_exact_experts` in a process of its own: prints how many pairs of interpreted kernels differ."""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch
from torch import Tensor

from gemray_kernels.numerics import NUM_SHARDS
from gemray_kernels.reference import routing
from gemray_kernels.triton import experts
from gemray_kernels.triton.exact_experts import expert_outputs, expert_subtrees
from gemray_kernels.triton.expert_tile import ExpertTile
from support.kernels.exact_experts import pairs_that_differ, pairs_that_differ_over_ranks, random_case
from support.kernels.kernel_parity import poisoned_memory, relative_error
from support.kernels.quick_interpreter import patch_language_once

COUNTS = (1, 16, 17)
WEIGHT_FIRST = ExpertTile(pairs=16, outputs=16, inputs=32, num_warps=4, num_stages=2, weight_first=True)


def main() -> None:
    """Float32: interpreted bfloat16 is truncated. Leaves of 20 inputs are a whole block and a part of one."""
    case = random_case(rows=17, hidden=48, width=160, experts=4, top_k=2, dtype=torch.float32, device="cpu")
    everything = torch.arange(17)
    with poisoned_memory():
        for count, pairs in pairs_that_differ(expert_outputs, case, COUNTS, probes=3).items():
            print(f"{count} rows", pairs, sep="\t")
        with mock.patch.object(experts, "MANY_ROWS", 16):
            print(
                "17 rows as of a prompt", *pairs_that_differ(expert_outputs, case, (17,), probes=3).values(), sep="\t"
            )
        for count in (3, 17):
            chosen = case.outputs(expert_outputs, everything[:count])
            flipped = case.outputs(partial(expert_outputs, tile=WEIGHT_FIRST), everything[:count])
            print(f"{count} rows, the weight first", int((flipped != chosen).any(dim=-1).sum()), sep="\t")
        for size, pairs in pairs_that_differ_over_ranks(expert_outputs, expert_subtrees, case, everything[:2]).items():
            print(f"{size} ranks, few rows", pairs, sep="\t")
        for size in (2, 8):
            part = case.rank(size - 1, size)
            few, many = (
                part.outputs(expert_subtrees, rows, NUM_SHARDS // size) for rows in (everything[:3], everything[:17])
            )
            print(f"a rank of {size}, few and many rows", int((few != many[:3]).sum()), sep="\t")

    def faulty(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, leaves: int) -> Tensor:
        return expert_outputs(x, chosen, gate_up, down, leaves if len(x) <= 16 else leaves // 2)

    found = pairs_that_differ(faulty, case, (17,), probes=3)
    print("a split that follows the rows", found[17], sep="\t")
    wide = [x.double() for x in (case.x_TH, case.gate_up_E2IH, case.down_EHI)]
    expected = routing.expert_outputs(wide[0], case.experts_TK, *wide[1:])
    print("relative error", relative_error(case.outputs(expert_outputs, everything), expected), sep="\t")


if __name__ == "__main__":
    patch_language_once()
    main()
