"""What gangs that follow the first one may serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemray_cluster.gang.served_checkpoints import ServedCheckpoints
from gemray_workers.checkpoint.identity import CheckpointIdentity, checkpoint_hash
from gemray_workers.config import EngineConfig
from gemray_workers.embedded import embedded_path
from gemray_workers.errors import CheckpointError
from gemray_workers.rank.process import ProcessLocation
from gemray_workers.rank.worker import RankWorker

MODEL, ASSISTANT = str(embedded_path("gemray-tiny")), str(embedded_path("gemray-tiny-assistant"))
ENGINE = EngineConfig(
    model_path=MODEL, drafter_path=ASSISTANT, tensor_parallel_size=1, dtype="float32", device="cpu", kv_memory_bytes=1
)


def _here(_: EngineConfig) -> ProcessLocation:
    return ProcessLocation(node_id="n", node_ip="127.0.0.1", gpu=None)


def _found(*hashes: str) -> list[CheckpointIdentity]:
    return [CheckpointIdentity(name="any", hash=found) for found in hashes]


def test_a_rank_tells_what_it_has() -> None:
    assert [found.hash for found in RankWorker(ENGINE, 0, _here).checkpoints()] == [
        checkpoint_hash(MODEL),
        checkpoint_hash(ASSISTANT),
    ]
    made_up = RankWorker(replace(ENGINE, random_weights=True), 0, _here).checkpoints()
    assert [found.hash for found in made_up] == ["", ""]


def test_the_drafter_counts_as_the_model_does() -> None:
    served = ServedCheckpoints()
    served.require(_found("a" * 64, "b" * 64), ENGINE, "first")
    served.require(_found("a" * 64, "b" * 64), ENGINE, "second")
    with pytest.raises(CheckpointError, match=rf"{ASSISTANT} on third holds .* hash cccccccccccc, .* hash bbbb"):
        served.require(_found("a" * 64, "c" * 64), ENGINE, "third")
    with pytest.raises(CheckpointError, match=rf"{MODEL} on third holds no weights, .* hash aaaa"):
        served.require(_found("", "b" * 64), ENGINE, "third")
