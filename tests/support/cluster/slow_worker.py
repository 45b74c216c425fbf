"""A worker whose last rank is slow to load, as one with a cold disk is."""

from __future__ import annotations

import time

import torch

from gemray_workers.checkpoint.loader import ProgressFn
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.rank.worker import RankWorker

DELAY_S = 4.0


class SlowWorker(RankWorker):
    def _build_engine_rank(self, gang: Communicator, device: torch.device, progress: ProgressFn | None) -> EngineRank:
        if gang.rank == gang.size - 1:
            time.sleep(DELAY_S)
        return super()._build_engine_rank(gang, device, progress)
