"""Which all-reduce a rank takes."""

from __future__ import annotations

import pytest
import torch

from gemray_workers.config import AllReduceName
from gemray_workers.errors import InvalidField
from gemray_workers.rank import all_reduce as module
from gemray_workers.rank.process import ProcessLocation, RankSetup
from gemray_workers.rank.worker import RankWorker
from support.checkpoints.tiny import tiny_checkpoint
from support.engine.engine_runner import engine_config


@pytest.mark.parametrize(("all_reduce", "tried"), [("auto", 1), ("library", 0)])
def test_the_one_kernel_is_tried_unless_the_library_is_asked_for(
    all_reduce: AllReduceName, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(module, "use_one_shot_if_sound", lambda *arguments: calls.append(arguments))
    config = engine_config(tiny_checkpoint("31B"), all_reduce=all_reduce)
    rank = RankWorker(config, 0, lambda _config: ProcessLocation("here", "127.0.0.1", gpu=None))
    rank.load(RankSetup(rendezvous="tcp://127.0.0.1:1", interface_ip="127.0.0.1", threads=torch.get_num_threads()))
    rank.close()
    assert len(calls) == tried


def test_other_words_are_refused() -> None:
    with pytest.raises(InvalidField, match="one of auto, library"):
        engine_config(tiny_checkpoint("31B"), all_reduce="nccl")
