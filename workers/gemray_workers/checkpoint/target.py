"""What a model asks of a checkpoint: for each tensor on disk, which part of it goes where on this rank.

The model states its sharding as data (one `WeightTarget` a checkpoint tensor); the loader only reads and copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

TensorRole = Literal["weight", "codes", "scale"]
"""What a tensor's numbers are: the model's own, which may be cast; packed ones, which are kept as they are stored; or
what those are multiplied with, which must be finite and not negative."""


@dataclass(frozen=True)
class Copy:
    """One block of a checkpoint tensor and its place in this rank's memory."""

    source: tuple[slice, ...]
    """One slice a dimension of the tensor on disk, with explicit start and stop."""
    destination: Tensor
    """A view of a parameter or buffer with the block's shape; the loader casts to its dtype."""
    spread: bool = False
    """Whether the block, of length 1 in some dimensions, fills a longer destination: a scale that many rows share."""


@dataclass(frozen=True)
class WeightTarget:
    """A tensor that the checkpoint must hold, exactly once."""

    name: str
    """Name below the text model's prefix, e.g. ``layers.3.self_attn.q_proj.weight``."""
    shape: tuple[int, ...]
    """Shape on disk."""
    copies: tuple[Copy, ...]
    """Empty when this rank keeps no part of it; the loader still checks its name and shape."""
    at_root: bool = False
    """Whether `name` stands below no prefix, as a head's does."""
    stand_in: str | None = None
    """Full name of an equal tensor, which is read where this one is not on disk: of tied tables one is enough."""
    role: TensorRole = "weight"
    format: str = ""
    """How packed numbers lie on disk, in words."""
    weights_each: int = 1
    """The model's numbers that each element holds: 8 of packed int4, none of a scale."""
    random_value: float = 1.0
    """What random weights set a scale to."""
    then: Callable[[], None] | None = None
    """Called when everything is filled, once for all targets that name it."""

    def full_name(self, prefix: str) -> str:
        """Name on disk."""
        return self.name if self.at_root else prefix + self.name


def settle(targets: Iterable[WeightTarget]) -> float:
    """Do what is to follow once all targets are filled, and return how many seconds that took."""
    started = time.monotonic()
    for then in dict.fromkeys(target.then for target in targets if target.then is not None):
        then()
    return time.monotonic() - started


def bytes_held(targets: Iterable[WeightTarget]) -> int:
    """Bytes of the memory that the targets' copies lie in, padding included; what several share counts once."""
    tensors = [copy.destination for target in targets for copy in target.copies]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
