"""A cycle that the host has enqueued and not yet learned from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_workers.engine.cycle import CycleOutput
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.execution.step_clock import StepMarks
from gemray_workers.scheduling.plan import StepPlan


@dataclass(frozen=True)
class Flight:
    """A step between its enqueueing and its commit."""

    plan: StepPlan
    cycle: CyclePlan
    output: CycleOutput
    marks: StepMarks
    found: HostResult
    wants_logprobs: bool
    """Whether log-probabilities are to be read from `output`, which they must before the next step starts."""


class HostResult:
    """A small device tensor on its way to the host."""

    def __init__(self, tensor: Tensor | None) -> None:
        """Enqueue the copy, behind all that the device still has to do."""
        self._done: torch.cuda.Event | None = None
        self._host = tensor
        if tensor is not None and tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def rows(self) -> list[list[int]]:
        """Its rows; waits until they have arrived."""
        if self._done is not None:
            self._done.synchronize()
        return [] if self._host is None else self._host.tolist()
