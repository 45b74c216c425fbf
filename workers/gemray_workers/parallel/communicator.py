"""The few collective operations that the engine uses, named at every call site.

A `Communicator` spans the tensor-parallel ranks of one gang. Tensors travel over NCCL on GPUs and gloo on
CPU; small host messages (step plans) always travel over gloo.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from gemray_kernels.numerics import tree_sum
from gemray_kernels.precision import compute_dtype

__all__ = ["Communicator", "SoloCommunicator", "compute_dtype"]


class Communicator(Protocol):
    """Collectives over the tensor-parallel ranks. Every rank must call the same ones in the same order."""

    @property
    def rank(self) -> int:
        """This process's rank, 0 <= rank < size."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are (TP)."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The elementwise sum of every rank's `x`, bit-identical on all ranks. May reuse `x`'s memory."""
        ...

    def all_reduce_tree(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """The elementwise sum [...] of every rank's parts by the tree of `gemray_kernels.numerics`, rounded once to
        `dtype`: the bits of one rank that adds up the same leaves.

        Args:
            parts: [S, ...] in the compute dtype, this rank's aligned subtrees in order; S a power of two, as many as
                every rank has, or another number of subtrees of the same leaves.
            dtype: of the sum.

        Raises:
            ValueError: the ranks or the parts are no power of two.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` stacked in rank order along a new first dimension: [size, *x.shape]."""
        ...

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's `payload` on every rank (others pass None). Host memory only."""
        ...

    def barrier(self) -> None:
        """Return when every rank has arrived, or raise at the group's deadline."""
        ...


class PointToPoint(Protocol):
    """Tensors from one rank of a gang to another: how a drafter on a device of its own is fed."""

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to one rank, which must `receive` a tensor of its shape and dtype."""
        ...

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill `x` with what `source` sends, and return it."""
        ...


class SoloCommunicator:
    """The communicator of TP = 1: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def all_reduce_tree(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the parts' sum by the tree."""
        return tree_sum(parts).to(dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return `x` with a leading dimension of one."""
        return x.unsqueeze(0)

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Return `payload`."""
        if payload is None:
            raise ValueError("rank 0 must give a payload to broadcast")
        return payload

    def barrier(self) -> None:
        """Return at once."""
