"""Products over packed weights, which are laid out for their kernels once a checkpoint has filled them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

ProductsT = TypeVar("ProductsT")


class FilledProducts(Generic[ProductsT]):
    """What a layer multiplies by, from the moment that its packed weights are filled."""

    def __init__(self, lay_out: Callable[[], ProductsT]) -> None:
        """`lay_out`: makes the products of the filled weights, whose memory they may take."""
        self._lay_out = lay_out
        self._products: ProductsT | None = None

    def fill(self) -> None:
        """Lay out the weights; called when a checkpoint has filled all of them."""
        self._products = self._lay_out()

    @property
    def now(self) -> ProductsT:
        """The products; raises RuntimeError before the weights are filled."""
        if self._products is None:
            raise RuntimeError("packed weights multiply once they are filled")
        return self._products
