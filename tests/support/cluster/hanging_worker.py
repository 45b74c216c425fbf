"""Workers whose last rank does not come to an all-reduce of a step that the others wait in."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from typing_extensions import override

from gemray_workers.channel import ChannelAddress
from gemray_workers.parallel.torch_communicator import TorchCommunicator
from gemray_workers.rank.worker import RankWorker

CAME = 40
"""All-reduces that it still comes to once it serves: a few steps, and some layers."""
FOR_EVER_S = 3600.0


class SleepingWorker(RankWorker):
    """It sleeps."""

    @override
    def run(self, address: ChannelAddress | None) -> None:
        comm: Any = self._comm
        if comm.rank == comm.size - 1:
            comm.all_reduce = self._forgetful(comm.all_reduce)
        super().run(address)

    def _forgetful(self, all_reduce: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        left = CAME

        def call(x: Tensor) -> Tensor:
            nonlocal left
            left -= 1
            if left < 0:
                assert self._comm is not None
                self.hang(self._comm)
            return all_reduce(x)

        return call

    def hang(self, comm: TorchCommunicator) -> None:
        """Stay here."""
        time.sleep(FOR_EVER_S)


class StrayingWorker(SleepingWorker):
    """It is in another collective."""

    @override
    def hang(self, comm: TorchCommunicator) -> None:
        comm.barrier()
