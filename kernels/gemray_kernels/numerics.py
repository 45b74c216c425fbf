"""How a model's numbers are added up, and the one order that exact numerics keep.

In exact numerics a row's bits depend on its own inputs alone: not on how many rows share a call, nor on how many
ranks share a weight. A product's inputs are cut into equal **leaves**; within a leaf one sum runs over the inputs in
order, and the leaves' sums are added by a fixed binary tree, ``((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7))``, and
rounded once. A rank of 2, 4 or 8 holds an aligned subtree of the leaves of a weight whose inputs are split (arXiv
2511.17826 shows such trees), and so may a program: how many of either there are does not change a sum.

Shape legend: S summands, an aligned subtree's sum each, in order.
"""

from __future__ import annotations

from enum import Enum

from torch import Tensor

NUM_SHARDS = 8
"""Leaves of a product whose inputs ranks may split: as many ranks can share it."""
LEAST_INPUTS = 256
"""Inputs that a leaf has at least where ranks do not decide how many leaves there are."""
ALIGNMENT = 8
"""A leaf of a weight in bfloat16 begins at a multiple of so many inputs, 16 bytes."""
ENOUGH_OUTPUTS = 2048
"""Tiles of 16 to 64 outputs then keep enough multiprocessors reading: more leaves would only be added up."""


class Numerics(Enum):
    """What a row's numbers may depend on."""

    FAST = "fast"
    """On how sums are cut: by the rows beside it, the chunk, the number of ranks."""
    EXACT = "exact"
    """On the row itself alone."""


def leaves_of(num_out: int, num_in: int) -> int:
    """Choose how many leaves a product has whose inputs no rank splits: 1 where it has many outputs.

    Args:
        num_out: outputs of the whole weight, of all ranks together.
        num_in: its inputs.
    """
    leaves = 1
    while (
        leaves < NUM_SHARDS
        and num_out * leaves < ENOUGH_OUTPUTS
        and num_in >= 2 * leaves * LEAST_INPUTS
        and num_in % (2 * leaves * ALIGNMENT) == 0
    ):
        leaves *= 2
    return leaves


def tree_sum(parts_S: Tensor) -> Tensor:
    """Sum over the first axis by the tree: neighbours first.

    Args:
        parts_S: [S, ...], S a power of two. They are not rounded in between: pass the compute dtype.

    Raises:
        ValueError: S is not a power of two.
    """
    if not is_tree(parts_S.shape[0]):
        raise ValueError(f"{parts_S.shape[0]} parts: a power of two is allowed")
    while parts_S.shape[0] > 1:
        parts_S = parts_S[0::2] + parts_S[1::2]
    return parts_S[0]


def is_tree(num_parts: int) -> bool:
    """Whether so many parts are added by the tree: a power of two."""
    return num_parts > 0 and num_parts & (num_parts - 1) == 0
