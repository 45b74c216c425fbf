"""Workers whose last rank is slow to start, as one with a cold disk or a cold compiler cache is."""

from __future__ import annotations

import time

import torch
from typing_extensions import override

from gemray_workers.checkpoint.loader import ProgressFn
from gemray_workers.messages import ModelInfo, RankInfo
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.rank.worker import RankWorker
from gemray_workers.sampling.verify import Accept

DELAY_S = 10.0
FOR_EVER_S = 3600.0


class SlowWorker(RankWorker):
    """Late at each place where the others wait for it: joining, loading, warming up."""

    @override
    def _join(self, rendezvous: str) -> Communicator:
        self._dawdle()
        return super()._join(rendezvous)

    @override
    def _build_engine_rank(self, gang: Communicator, device: torch.device, progress: ProgressFn | None) -> EngineRank:
        self._dawdle()
        return super()._build_engine_rank(gang, device, progress)

    @override
    def _warm_up(self, accept: Accept) -> tuple[ModelInfo, RankInfo]:
        self._dawdle()
        return super()._warm_up(accept)

    def _dawdle(self) -> None:
        if self._rank == self._config.gang_size - 1:
            time.sleep(DELAY_S)


class StuckWorker(RankWorker):
    """Its weights never come."""

    @override
    def _build_engine_rank(self, gang: Communicator, device: torch.device, progress: ProgressFn | None) -> EngineRank:
        if self._rank == self._config.gang_size - 1:
            time.sleep(FOR_EVER_S)
        return super()._build_engine_rank(gang, device, progress)
