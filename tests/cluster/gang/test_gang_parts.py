"""Small parts of the gang: settings, the meeting point, errors that cross processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import psutil
import pytest

from gemray_cluster.gang.client import GangUnavailable
from gemray_cluster.gang.config import ClusterConfig
from gemray_cluster.gang.diagnosis import require_same_versions, same_model
from gemray_cluster.ray_runtime.session import ClusterUnreachable, _reach
from gemray_workers.checkpoint.identity import CheckpointIdentity
from gemray_workers.config import EngineConfig
from gemray_workers.errors import InvalidField
from gemray_workers.messages import ModelInfo
from gemray_workers.rank.process import ProcessLocation, RankFacts
from gemray_workers.rank.worker import RankWorker

ENGINE = EngineConfig(model_path="/fake", tensor_parallel_size=2, dtype="float32", device="cpu", kv_memory_bytes=1)


def here(_config: EngineConfig) -> ProcessLocation:
    return ProcessLocation("this-machine", "127.0.0.1", gpu=None)


@pytest.mark.parametrize(
    "bad",
    [
        {"cpus_per_rank": 0},
        {"threads_per_rank": 0},
        {"local_num_cpus": 0},
        {"local_num_gpus": -1},
        {"strategy": "near"},
        {"address": ""},
        {"namespace": ""},
        {"placement_deadline_s": 0},
        {"start_deadline_s": -1.0},
        {"heartbeat_deadline_s": float("nan")},
        {"stop_deadline_s": 0},
        {"connect_deadline_s": 0},
    ],
)
def test_bad_settings_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        ClusterConfig(**bad)
    assert caught.value.field == next(iter(bad))


def test_local_sizes_and_an_address_exclude_each_other() -> None:
    with pytest.raises(InvalidField, match="local_num_cpus = 4 is not allowed: unset"):
        ClusterConfig(address="10.0.0.1:6379", local_num_cpus=4)


def test_the_meeting_point_listens_where_it_is_told_and_nowhere_else() -> None:
    worker = RankWorker(ENGINE, 0, here)
    port = int(worker.open_rendezvous("127.0.0.1").removeprefix("tcp://127.0.0.1:"))
    listening = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", port)]
    worker.close()


def test_run_before_load_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before load"):
        RankWorker(ENGINE, 0, here).run(None)


def test_an_invalid_field_crosses_processes_whole() -> None:
    copy = pickle.loads(pickle.dumps(InvalidField("tp", 3, "a divisor of 8")))
    assert (copy.field, copy.value, copy.allowed) == ("tp", 3, "a divisor of 8")
    assert str(copy) == "tp = 3 is not allowed: a divisor of 8"


def test_ranks_of_different_software_are_refused() -> None:
    def facts(version: str) -> RankFacts:
        return RankFacts(node_id="n", node_ip="i", host="h", pid=1, cores=1, versions={"torch": version})

    require_same_versions([facts("2.13"), facts("2.13")])
    with pytest.raises(GangUnavailable, match=r"rank 1 on h has \{'torch': '2\.11'\}"):
        require_same_versions([facts("2.13"), facts("2.11")])


def test_ranks_that_disagree_about_the_model_are_refused() -> None:
    def model(length: int) -> ModelInfo:
        return ModelInfo(
            model_type="m", hidden_size=1, num_layers=1, num_attention_heads=1, layer_types=[], vocab_size=1,
            max_model_len=length, max_position_embeddings=9, dtype="float32", tensor_parallel_size=2,
            sliding_window=1, choices=[], checkpoint=CheckpointIdentity(name="m"),
        )  # fmt: skip

    assert same_model([model(8), model(8)]) == model(8)
    with pytest.raises(GangUnavailable, match="ranks 0 and 1 disagree about the model: max_model_len: 8 and 7"):
        same_model([model(8), model(7)])


async def test_a_head_that_does_not_answer_is_an_error_in_time() -> None:
    with pytest.raises(ClusterUnreachable, match=r"no Ray head answers at 127\.0\.0\.1:1 within 1 s"):
        await _reach("127.0.0.1:1", 1)


def test_workers_import_no_ray_and_no_grpc() -> None:
    code = "import sys, gemray_workers.channel; print(sorted({'ray', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
