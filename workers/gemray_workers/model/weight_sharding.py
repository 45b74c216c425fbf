"""Which part of the model one rank holds, and how that part is said to the checkpoint loader.

Shape legend: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_kernels.numerics import NUM_SHARDS, Numerics, leaves_of
from gemray_kernels.table import Kernels, kernels_for
from gemray_workers.checkpoint.quantized.recipe import Recipe
from gemray_workers.checkpoint.target import Copy, WeightTarget


@dataclass(frozen=True)
class WeightSharding:
    """A rank's share of every tensor: its place among the ranks, and the dtype and device of what it keeps."""

    rank: int
    size: int
    dtype: torch.dtype
    device: torch.device
    recipe: Recipe | None = None
    """What of the model is quantized on disk."""
    numerics: Numerics = Numerics.FAST

    @property
    def kernels(self) -> Kernels:
        """The kernels that serve this device, dtype and numerics."""
        return kernels_for(self.device, self.dtype, self.numerics)

    @property
    def leaves(self) -> int:
        """A rank's leaves of inputs that ranks split: its share of the virtual shards (`gemray_kernels.numerics`)."""
        return NUM_SHARDS // self.size

    def empty(self, *shape: int) -> Tensor:
        """A tensor that a checkpoint is to fill."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def part(self, length: int) -> Part:
        """This rank's even share of a dimension; `check_tensor_parallel` has made sure that it divides."""
        local = length // self.size
        return Part(start=self.rank * local, length=local, whole=length)


@dataclass(frozen=True)
class Part:
    """A contiguous share of a dimension of a checkpoint tensor."""

    start: int
    length: int
    whole: int

    def times(self, width: int) -> Part:
        """The same share of a dimension that holds `width` entries for each of this one's (heads -> features)."""
        return Part(start=self.start * width, length=self.length * width, whole=self.whole * width)


def leaves_of_stack(outputs: Sequence[tuple[str, Part]], num_in: int) -> int:
    """Leaves of layers of the same input whose outputs ranks split: those of the whole layers."""
    return leaves_of(sum(part.whole for _, part in outputs), num_in)


def whole_tensor(name: str, destination: Tensor) -> WeightTarget:
    """A tensor that every rank keeps in full."""
    shape = tuple(destination.shape)
    return WeightTarget(name, shape, (Copy(tuple(slice(0, n) for n in shape), destination),))


def sliced_tensor(name: str, dim: int, part: Part, destination: Tensor) -> WeightTarget:
    """A tensor of which a rank keeps `part` of dimension `dim`."""
    shape = list(destination.shape)
    shape[dim] = part.whole
    return WeightTarget(name, tuple(shape), (slice_copy(dim, part, destination),))


def stacked_tensors(
    outputs: Sequence[tuple[str, Part]], num_in: int, sharding: WeightSharding
) -> tuple[Tensor, list[WeightTarget]]:
    """One weight [O, I] for the parts of several layers of the same input, and the checkpoint tensors that fill it."""
    sizes = [part.length for _, part in outputs]
    weight_OI = sharding.empty(sum(sizes), num_in)
    blocks = torch.split(weight_OI, sizes)
    return weight_OI, [
        sliced_tensor(f"{name}.weight", 0, part, block) for (name, part), block in zip(outputs, blocks, strict=True)
    ]


def slice_copy(dim: int, part: Part, destination: Tensor, offset: int = 0) -> Copy:
    """Copy `part` of dimension `dim`, counted from `offset`, and all of the other dimensions, to `destination`."""
    source = [slice(0, n) for n in destination.shape]
    source[dim] = slice(offset + part.start, offset + part.start + part.length)
    return Copy(tuple(source), destination)
