"""A communicator for models whose bytes are counted and which never run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor


@dataclass(frozen=True)
class SilentCommunicator:
    """A rank and a size, for a model without memory; every collective is refused."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> NoReturn:
        """Refuse."""
        raise NotImplementedError("a model that is counted does not run")

    def all_reduce_tree(self, parts: Tensor, dtype: torch.dtype) -> NoReturn:
        """Refuse."""
        raise NotImplementedError("a model that is counted does not run")

    def all_gather(self, x: Tensor) -> NoReturn:
        """Refuse."""
        raise NotImplementedError("a model that is counted does not run")

    def broadcast_bytes(self, payload: bytes | None) -> NoReturn:
        """Refuse."""
        raise NotImplementedError("a model that is counted does not run")

    def barrier(self) -> NoReturn:
        """Refuse."""
        raise NotImplementedError("a model that is counted does not run")
