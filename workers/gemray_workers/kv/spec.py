"""The geometry of a KV group: the layers that share one kind of page (spec section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVGroupSpec:
    """Layers of one attention type and head dim, on one rank. Every layer of a group has its own pages;
    the group has one block table, so page number n of a sequence is page n in each of its layers.
    """

    name: str
    """``sliding``, ``full``, or a drafter's own, e.g. ``dflash.sliding``."""
    layers: tuple[int, ...]
    """Indices of the layers that own KV here, ascending. KV-shared layers are not listed: they read a donor."""
    num_kv_heads: int
    """KV heads on this rank (replicated heads counted once a rank)."""
    head_dim: int
    page_size: int
    """Tokens a page."""
    window: int | None
    """Keys a query sees, itself included; None for full attention."""
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """K and V bytes of one token over all layers of the group, on this rank."""
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of the group, on this rank."""
        return self.page_size * self.bytes_per_token
