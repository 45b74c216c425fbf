"""Run by `test_triton_exact_products` in a process of its own: prints what differs, a line each.

The interpreter multiplies tiles by a library, whose order follows their shape. So the numbers are integers, whose sums
within a leaf are exact in any order, and each leaf's have a magnitude of their own, so that the order of leaves shows.
Gates are far from 0, where they are 0 or the identity.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gemray_kernels.numerics import tree_sum
from gemray_kernels.table import EXACT_REFERENCE, triton_exact_products
from gemray_kernels.triton.exact_gemm import GemmTile, gemm
from support.kernels.exact_rows import differing_ranks, differing_rows
from support.kernels.quick_interpreter import patch_language_once

COUNTS = (1, 16, 17, 64, 65, 129)
LARGEST = 8
"""Integers up to here."""
MAGNITUDES = (22, 0, 9, 27, 3, 24, 11, 30)
"""Powers of two by which the leaves differ."""


def main() -> None:
    """Products of 8 leaves of 40 inputs, which no tile divides, and of one leaf."""
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-LARGEST, LARGEST + 1, shape, generator=generator).float()

    products = triton_exact_products()
    for leaves in (1, 8):
        scale = torch.tensor([2.0**power for power in MAGNITUDES[:leaves]]).view(1, -1, 1)
        gate = torch.stack([torch.where(integers(130, 40 * leaves) > 0, 64.0, -64.0), integers(130, 40 * leaves)])
        x, weight = (integers(130, leaves, 40) * scale).flatten(1), integers(48, 40 * leaves)
        expected = tree_sum(EXACT_REFERENCE.wide_summands(x, weight, leaves))
        say(leaves, "reference", not torch.equal(tree_sum(products.wide_summands(x, weight, leaves)), expected))
        in_order = EXACT_REFERENCE.wide_summands(x, weight, leaves).cumsum(0)[-1]
        say(leaves, "the order shows", torch.equal(in_order, expected) if leaves > 1 else False)
        for line in differing_rows(products, x, weight, leaves, COUNTS, (1, 64, 129), gate):
            say(leaves, line, True)
        faulty = replace(
            products, summands=lambda x, w, n: products.summands(x, w, n if len(x) > 64 else max(1, n // 2))
        )
        if leaves > 1:
            say(leaves, "the fault shows", not differing_rows(faulty, x, weight, leaves, (17,), (), gate))
        for line in differing_ranks(products, x[:17], weight, leaves):
            say(leaves, line, True)
        if leaves == 1:
            found = gemm(x, weight, GemmTile(32, 16, 8, 4, 2), torch.float32)
            say(leaves, "large tiles", not torch.equal(found, expected))


def say(leaves: int, what: str, is_wrong: bool) -> None:
    """A line for each claim that was looked at and does not hold."""
    if is_wrong:
        print(leaves, what, sep="\t")


if __name__ == "__main__":
    patch_language_once()
    main()
    print("done")
