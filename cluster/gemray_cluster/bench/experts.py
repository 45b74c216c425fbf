"""How many experts of a layer a batch touches: what a mixture-of-experts row really reads.

They are counted in extra cycles, which are not timed. Shape legend: T rows, K experts a row.
"""

from __future__ import annotations

from statistics import mean

import torch
from torch import Tensor

from gemray_cluster.bench.inbox import MeasurementFailed
from gemray_cluster.bench.report import ExpertsTouched


class ExpertsWatch:
    """Counts the different experts of every layer in a number of steps."""

    def __init__(self, num_experts: int, *, first: int, steps: int) -> None:
        """Count in `steps` steps after the first `first` ones that decode the whole batch."""
        self._num_experts = num_experts
        self._first, self._last = first, first + steps
        self._num_decoded = 0
        self._counts: list[Tensor] = []

    def on_step(self, num_decoded: int) -> None:
        """Between steps: how many there have been."""
        self._num_decoded = num_decoded

    def on_experts(self, experts_TK: Tensor) -> None:
        """A layer's choices. The count stays on the device until the end."""
        if self._first <= self._num_decoded < self._last:
            touched = torch.zeros(self._num_experts, dtype=torch.int64, device=experts_TK.device)
            self._counts.append(touched.index_fill(0, experts_TK.flatten().long(), 1).sum())

    def result(self) -> ExpertsTouched:
        """Over all layers and steps. Raises MeasurementFailed when there were none."""
        if not self._counts:
            raise MeasurementFailed("no step of the whole batch was watched for its experts")
        counts = torch.stack(self._counts).tolist()
        return ExpertsTouched(
            mean=mean(counts), least=min(counts), most=max(counts), num_experts=self._num_experts,
            steps=self._last - self._first,
        )  # fmt: skip
