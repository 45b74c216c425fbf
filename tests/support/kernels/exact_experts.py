"""Where a (row, expert) pair's bits follow anything but its own row: each count is to be 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_kernels.numerics import NUM_SHARDS, tree_sum

ExpertSums = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""Signature of `gemray_kernels.reference.exact_experts.expert_outputs` and of `expert_subtrees`."""


@dataclass(frozen=True)
class ExpertsCase:
    """A layer of experts and a pool of rows with the experts that they chose."""

    x_TH: Tensor
    experts_TK: Tensor
    gate_up_E2IH: Tensor
    down_EHI: Tensor

    def outputs(self, sums: ExpertSums, rows: Tensor, leaves: int = NUM_SHARDS) -> Tensor:
        """Sums of some rows of the pool, in their order."""
        return sums(self.x_TH[rows], self.experts_TK[rows], self.gate_up_E2IH, self.down_EHI, leaves)

    def rank(self, rank: int, size: int) -> ExpertsCase:
        """The part of a rank among `size`: a slice of each expert's width."""
        gate, up = self.gate_up_E2IH.chunk(2, dim=1)
        own = [half.chunk(size, dim=1)[rank] for half in (gate, up)]
        down = self.down_EHI.chunk(size, dim=2)[rank].contiguous()
        return ExpertsCase(self.x_TH, self.experts_TK, torch.cat(own, dim=1), down)


def random_case(
    *, rows: int, hidden: int, width: int, experts: int, top_k: int, dtype: torch.dtype, device: str, seed: int = 0
) -> ExpertsCase:
    """Rows of which every fourth chooses the same experts, so that some experts have many rows and some few or none."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * gain).to(dtype)

    chosen = torch.rand(rows, experts, generator=generator, device=device).argsort(dim=1)[:, :top_k].contiguous()
    chosen[::4] = chosen[0].clone()
    return ExpertsCase(
        random(rows, hidden),
        chosen,
        random(experts, 2 * width, hidden, gain=hidden**-0.5),
        random(experts, hidden, width, gain=width**-0.5),
    )


def pairs_that_differ(sums: ExpertSums, case: ExpertsCase, counts: Sequence[int], probes: int) -> dict[int, int]:
    """By number of rows in a call: pairs of some rows, anywhere in the call, that differ from those of the row alone.

    Args:
        sums: the kernel.
        case: with at least as many rows as the largest count.
        counts: numbers of rows.
        probes: how many of a call's rows are compared.
    """
    num_rows = len(case.x_TH)
    alone = {row: case.outputs(sums, torch.tensor([row])) for row in range(min(probes, num_rows))}
    found = {}
    for count in counts:
        rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(count))
        # The probes come first in the pool; as many of them as fit lie anywhere in the call.
        rows = torch.cat([torch.arange(probes), rows[rows >= probes]])[:count]
        rows = rows[torch.randperm(count, generator=torch.Generator().manual_seed(count))]
        together = case.outputs(sums, rows)
        found[count] = sum(
            int((together[place] != alone[row][0]).any(dim=-1).sum())
            for place, row in enumerate(rows.tolist())
            if row in alone
        )
    return found


def pairs_that_differ_over_ranks(
    outputs: ExpertSums, subtrees: ExpertSums, case: ExpertsCase, rows: Tensor
) -> dict[int, int]:
    """By number of ranks: pairs whose parts, added by the tree and rounded, are not the output of one rank."""
    whole = case.outputs(outputs, rows)
    found = {}
    for size in (1, 2, 4, 8):
        parts = [case.rank(rank, size).outputs(subtrees, rows, NUM_SHARDS // size) for rank in range(size)]
        found[size] = int((tree_sum(torch.stack(parts)).to(whole.dtype) != whole).any(dim=-1).sum())
    return found
