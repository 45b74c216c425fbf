"""Exact products, row by row: is a row among others what it is alone, and are ranks together what one is?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gemray_kernels.numerics import NUM_SHARDS, tree_sum
from gemray_kernels.table import ExactProducts


def differing_rows(
    products: ExactProducts,
    x_TI: Tensor,
    weight_OI: Tensor,
    leaves: int,
    counts: Sequence[int],
    alone: Sequence[int],
    gate_STI: Tensor | None = None,
) -> list[str]:
    """What some row gets that differs: among the first so many rows, and alone.

    Args:
        products: what is tested.
        x_TI: rows; the results for all of them are what the others are compared with.
        weight_OI: an even number of outputs.
        leaves: of the product.
        counts: numbers of rows that are computed together.
        alone: rows that are computed alone.
        gate_STI: parts of the gate of `gated_projection`, whose factor is `x_TI`; None is numbers of `x_TI`.
    """
    parts_STI = torch.stack([x_TI, x_TI.flip(0)]) if gate_STI is None else gate_STI

    def results(rows: slice) -> dict[str, Tensor]:
        x = x_TI[rows]
        parts = products.summands(x, weight_OI, leaves)
        gated = products.gated_projection(parts_STI[:, rows], x, weight_OI, leaves)
        return {
            "linear": products.linear(x, weight_OI, leaves),
            "summands": tree_sum(parts).to(x.dtype),
            "wide": tree_sum(products.wide_summands(x, weight_OI, leaves)),
            "gelu": products.gelu_linear(x, weight_OI, leaves),
            "silu": products.silu_linear(x, weight_OI, leaves),
            "gated": tree_sum(gated).to(x.dtype),
        }

    together = results(slice(None))
    wide = together["wide"].to(x_TI.dtype)
    found = [name for name in ("linear", "summands") if not torch.equal(together[name], wide)]
    for rows in [*(slice(count) for count in counts), *(slice(row, row + 1) for row in alone)]:
        for name, result in results(rows).items():
            if not torch.equal(result, together[name][rows]):
                found.append(f"{name}, rows {rows.start or 0} to {rows.stop}")
    return found


def differing_ranks(products: ExactProducts, x_TI: Tensor, weight_OI: Tensor, leaves: int) -> list[str]:
    """Numbers of ranks whose parts, put or added together, are not the bits of one rank.

    `leaves` are those of a weight whose outputs are split; one whose inputs are split has `NUM_SHARDS`.
    """
    return [
        f"{ranks} ranks, {name}" for ranks in (2, 4, 8) for name in _of_ranks(products, x_TI, weight_OI, leaves, ranks)
    ]


def _of_ranks(products: ExactProducts, x_TI: Tensor, weight_OI: Tensor, leaves: int, ranks: int) -> Iterator[str]:
    num_out, num_in = weight_OI.shape
    if num_in % NUM_SHARDS == 0:
        inputs = zip(torch.chunk(x_TI, ranks, 1), torch.chunk(weight_OI, ranks, 1), strict=True)
        sums = [
            tree_sum(products.wide_summands(x.contiguous(), weight.contiguous(), NUM_SHARDS // ranks))
            for x, weight in inputs
        ]
        if not torch.equal(tree_sum(torch.stack(sums)).to(x_TI.dtype), products.linear(x_TI, weight_OI, NUM_SHARDS)):
            yield "inputs"
    if num_out % (2 * ranks) == 0:
        outputs = [products.linear(x_TI, weight, leaves) for weight in torch.chunk(weight_OI, ranks)]
        if not torch.equal(torch.cat(outputs, 1), products.linear(x_TI, weight_OI, leaves)):
            yield "outputs"
        gates = weight_OI.view(2, ranks, -1, num_in).transpose(0, 1).flatten(1, 2)
        gated = [products.gelu_linear(x_TI, weight.contiguous(), leaves) for weight in gates]
        if not torch.equal(torch.cat(gated, 1), products.gelu_linear(x_TI, weight_OI, leaves)):
            yield "gated outputs"
