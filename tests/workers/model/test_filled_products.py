"""Products over packed weights: none before a checkpoint has filled them, then those of what it filled."""

from __future__ import annotations

import pytest

from gemray_workers.model.filled_products import FilledProducts


def test_products_are_laid_out_when_the_weights_are_filled() -> None:
    weight = [0]
    products = FilledProducts(lambda: tuple(weight))
    with pytest.raises(RuntimeError, match="once they are filled"):
        _ = products.now
    weight[0] = 7
    products.fill()
    assert products.now == (7,)
