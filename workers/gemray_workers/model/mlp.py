"""The dense gated MLP, its width sharded over the ranks (spec 1.7).

Shape legend: T rows, H hidden size, S summands.
"""

from __future__ import annotations

from torch import Tensor

from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.model.linear import ColumnParallelLinear, RowParallelLinear
from gemray_workers.model.weight_sharding import WeightSharding
from gemray_workers.parallel.communicator import Communicator


class MLP:
    """``down(gelu_tanh(gate(x)) · up(x))``."""

    def __init__(self, prefix: str, hidden_size: int, width: int, comm: Communicator, sharding: WeightSharding) -> None:
        self._comm = comm
        part = sharding.part(width)
        self._gate_up_proj = ColumnParallelLinear(
            [(f"{prefix}.gate_proj", part), (f"{prefix}.up_proj", part)], hidden_size, sharding
        )
        self._down_proj = RowParallelLinear(f"{prefix}.down_proj", part, hidden_size, sharding)

    def __call__(self, x_TH: Tensor) -> Tensor:
        """Summands [S, T, H] of the output, the same on every rank."""
        return self._down_proj.summands(self._gate_up_proj.gelu(x_TH), self._comm)

    def starts_at_once(self, num_rows: int) -> bool:
        """Whether the kernel before is to let the first one of so many rows start at once."""
        return self._gate_up_proj.gate_starts_at_once(num_rows)

    def weight_targets(self) -> list[WeightTarget]:
        """The three projections."""
        return self._gate_up_proj.weight_targets() + self._down_proj.weight_targets()
