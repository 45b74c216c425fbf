"""What a rank lets go of when it leaves its gang, and when."""

from __future__ import annotations

import weakref
from typing import Any, cast

import pytest
import torch

from gemray_workers.parallel.torch_communicator import TorchCommunicator
from gemray_workers.rank.process import ProcessLocation, RankSetup
from gemray_workers.rank.worker import RankWorker
from support.checkpoints.tiny import tiny_checkpoint
from support.engine.engine_runner import engine_config


class WatchedComm:
    """A group that, as NCCL's, must not be left while the engine's graphs may still hold it."""

    def __init__(self, engine_rank: weakref.ref[Any]) -> None:
        self._engine_rank = engine_rank
        self.held_when_left: bool | None = None

    def close(self) -> None:
        self.held_when_left = self._engine_rank() is not None


def test_the_engine_is_freed_before_the_gang_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = RankWorker(
        engine_config(tiny_checkpoint("31B")), 0, lambda _config: ProcessLocation("here", "127.0.0.1", gpu=None)
    )
    worker.load(RankSetup(rendezvous="tcp://127.0.0.1:1", interface_ip="127.0.0.1", threads=torch.get_num_threads()))
    assert worker._engine_rank is not None
    comm = WatchedComm(weakref.ref(worker._engine_rank))
    monkeypatch.setattr(worker, "_comm", cast(TorchCommunicator, comm))
    worker.close()
    assert comm.held_when_left is False
