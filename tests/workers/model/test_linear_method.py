"""The linear layers hold and multiply their weights by the method that they are given, on every rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from gemray_workers.model.linear_method import PLAIN, LinearMethod, LinearWeight
from gemray_workers.model.weight_sharding import Part, WeightSharding
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator


class Doubled(LinearMethod):
    """Twice the plain product, as a format with a scale of 2 would have it."""

    @override
    def whole(self, name: str, num_out: int, num_in: int, sharding: WeightSharding) -> LinearWeight:
        return DoubledWeight(PLAIN.whole(name, num_out, num_in, sharding))

    @override
    def by_outputs(self, outputs: Sequence[tuple[str, Part]], num_in: int, sharding: WeightSharding) -> LinearWeight:
        return DoubledWeight(PLAIN.by_outputs(outputs, num_in, sharding))

    @override
    def by_inputs(self, name: str, inputs: Part, num_out: int, sharding: WeightSharding) -> LinearWeight:
        return DoubledWeight(PLAIN.by_inputs(name, inputs, num_out, sharding))


class DoubledWeight(LinearWeight):
    def __init__(self, plain: LinearWeight) -> None:
        self._plain = plain

    @override
    def product(self, x_TI: Tensor) -> Tensor:
        return 2 * self._plain.product(x_TI)

    @override
    def wide_summands(self, x_TI: Tensor) -> Tensor:
        return 2 * self._plain.wide_summands(x_TI)

    @override
    def summands(self, x_TI: Tensor, first: int = 0, length: int | None = None) -> Tensor:
        return 2 * self._plain.summands(x_TI, first, length)

    @override
    def gated_summands(self, summands_STI: Tensor, factor_TI: Tensor) -> Tensor:
        raise AssertionError("no gated layer is among these")

    @override
    def gelu(self, x_TI: Tensor) -> Tensor:
        raise AssertionError("no gated layer is among these")

    @override
    def silu(self, x_TI: Tensor) -> Tensor:
        raise AssertionError("no gated layer is among these")

    @override
    def weight_targets(self) -> list[WeightTarget]:
        return self._plain.weight_targets()


def sharding_of(rank: int) -> WeightSharding:
    return WeightSharding(rank=rank, size=2, dtype=torch.float64, device=torch.device("cpu"))


def filled(targets: list[WeightTarget], weights: dict[str, Tensor]) -> None:
    assert [target.name for target in targets] == list(weights)
    for target in targets:
        assert target.shape == tuple(weights[target.name].shape)
        for copy in target.copies:
            copy.destination.copy_(weights[target.name][copy.source])


@pytest.mark.parametrize(("method", "factor"), [(PLAIN, 1), (Doubled(), 2)], ids=["plain", "doubled"])
def test_the_ranks_parts_make_the_whole_product(method: LinearMethod, factor: int) -> None:
    torch.manual_seed(0)
    x_TI = torch.randn(3, 6, dtype=torch.float64)
    query_OI, key_OI = torch.randn(4, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    whole, outputs, sums = [], [], []
    for rank in range(2):
        sharding = sharding_of(rank)
        replicated = ReplicatedLinear("q", 6, 4, sharding, method=method)
        filled(replicated.weight_targets(), {"q.weight": query_OI})
        whole.append(replicated(x_TI))
        columns = ColumnParallelLinear([("q", sharding.part(4)), ("k", sharding.part(2))], 6, sharding, method=method)
        filled(columns.weight_targets(), {"q.weight": query_OI, "k.weight": key_OI})
        outputs.append(columns(x_TI).split(columns.sizes, dim=-1))
        part = sharding.part(6)
        rows = RowParallelLinear("q", part, 4, sharding, method=method)
        filled(rows.weight_targets(), {"q.weight": query_OI})
        sums.append(rows.partial_sum(x_TI[:, part.start : part.start + part.length]))
    expected_TO = factor * x_TI @ query_OI.T
    torch.testing.assert_close(whole, [expected_TO, expected_TO])
    torch.testing.assert_close(torch.cat([q for q, _ in outputs], dim=-1), expected_TO)
    torch.testing.assert_close(torch.cat([k for _, k in outputs], dim=-1), factor * x_TI @ key_OI.T)
    torch.testing.assert_close(sums[0] + sums[1], expected_TO)


class Ahead(DoubledWeight):
    """Asks for the weight before up to eight rows."""

    @override
    def comes_ahead(self, num_rows: int) -> bool:
        return num_rows <= 8


class AheadMethod(Doubled):
    @override
    def by_inputs(self, name: str, inputs: Part, num_out: int, sharding: WeightSharding) -> LinearWeight:
        return Ahead(PLAIN.by_inputs(name, inputs, num_out, sharding))


def test_a_sum_over_ranks_comes_before_what_asks_for_its_weight_first() -> None:
    """What writes the rows lets a product start early, and no reduction."""
    projection = RowParallelLinear("o", Part(0, 4, 8), 3, sharding_of(0), method=AheadMethod())
    two = mock.Mock(spec=Communicator, size=2)
    assert [projection.comes_ahead(rows, SoloCommunicator()) for rows in (1, 8, 9)] == [True, True, False]
    assert not projection.comes_ahead(1, two)
    plain = RowParallelLinear("o", Part(0, 4, 8), 3, sharding_of(0))
    assert not plain.comes_ahead(1, SoloCommunicator())
