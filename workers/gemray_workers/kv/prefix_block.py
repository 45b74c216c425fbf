"""A page's worth of tokens behind a certain beginning: the nodes of the prefix cache's tree of texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Block:
    """Tokens behind a beginning, and where their KV is."""

    parent: Block | None
    """The block before; None for a root, which holds no tokens."""
    ids: bytes
    """Token ids, 8 bytes each; a root's is its salt."""
    key: int
    """Its chained hash."""
    length: int
    """Blocks from the text's start to this one, itself included; 0 for a root."""
    pages: dict[str, int] = field(default_factory=dict)
    """By group. Every full group has one."""
    children: set[Block] = field(default_factory=set)
    is_found: bool = True
    """Whether the cache still has it."""

    wanted_by: dict[str, set[Block]] = field(default_factory=dict)
    """By sliding group, the ends (`EvictionOrder`) whose last window it lies in; groups without any are left out."""
    is_hopeless: bool = False
    """Whether no end is left here or behind, so that nobody is expected to read its pages."""

    def upwards(self, count: int | None = None) -> Iterator[Block]:
        """This block and those before it, the nearest first and no root; at most `count` of them."""
        block, left = self, self.length if count is None else count
        while left > 0 and block.parent is not None:
            yield block
            block, left = block.parent, left - 1
