"""Each check says what is there, what is wanted, and what to do."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import psutil
import pytest

from gemray_cluster.check.interface import check_interface
from gemray_cluster.check.model_directory import Checkpoints, check_model_directory
from gemray_cluster.check.node import check_this_node
from gemray_cluster.check.port import check_port
from gemray_cluster.check.resources import check_room, require_room_here
from gemray_cluster.check.result import CheckResult, Status, fail, failed, ok
from gemray_cluster.check.shared_memory import check_shared_memory, local_size
from gemray_cluster.ray_runtime.placement import NodeResources
from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.errors import CapacityError

GIB = 2**30
GPU_RANK = {"GPU": 1.0, "CPU": 1.0}


def _node(address: str, gpus: float, free_gpus: float | None = None) -> NodeResources:
    free = gpus if free_gpus is None else free_gpus
    return NodeResources(address, {"CPU": 16.0, "GPU": gpus}, {"CPU": 16.0, "GPU": free})


@pytest.mark.parametrize(
    ("nodes", "status", "parts"),
    [
        ([_node("10.0.0.1", 4)], Status.OK, ["2 x {GPU: 1, CPU: 1} wanted", "10.0.0.1 has room for 4"]),
        (
            [_node("10.0.0.1", 0), _node("10.0.0.2", 1)],
            Status.FAIL,
            ["1 available", "10.0.0.1 has room for 0 (GPU 0 of 0 free", "10.0.0.2 has room for 1", "lower --tp"],
        ),
        ([_node("10.0.0.1", 2, 1)], Status.FAIL, ["1 available", "GPU 1 of 2 free", "something else holds the rest"]),
        ([_node("10.0.0.1", 1), _node("10.0.0.2", 1)], Status.WARN, ["several nodes together", "cross the network"]),
        ([], Status.FAIL, ["no live node"]),
    ],
)
def test_room(nodes: list[NodeResources], status: Status, parts: list[str]) -> None:
    result = check_room(nodes, num_ranks=2, bundle=GPU_RANK)
    assert result.status is status
    for part in parts:
        assert part in result.sentence


@pytest.mark.parametrize(
    ("nodes", "status", "parts"),
    [
        ([_node("10.0.0.1", 4)], Status.OK, ["2 gangs of 2 x {GPU: 1, CPU: 1}"]),
        ([_node("10.0.0.1", 2), _node("10.0.0.2", 2)], Status.OK, ["2 gangs"]),
        ([_node("10.0.0.1", 3)], Status.FAIL, ["4 x {GPU: 1, CPU: 1} wanted, 3 available", "lower --replicas or --tp"]),
        ([_node("10.0.0.1", 3), _node("10.0.0.2", 1)], Status.WARN, ["several nodes together"]),
    ],
)
def test_room_for_replicas(nodes: list[NodeResources], status: Status, parts: list[str]) -> None:
    result = check_room(nodes, num_ranks=2, bundle=GPU_RANK, num_gangs=2)
    assert result.status is status
    for part in parts:
        assert part in result.sentence


def test_room_that_one_machine_never_has() -> None:
    """What is in use there may come free, but no node joins."""
    require_room_here([_node("10.0.0.1", 2, 0)], num_ranks=2, bundle=GPU_RANK)
    with pytest.raises(CapacityError, match=r"4 x \{GPU: 1, CPU: 1\} wanted, this machine's Ray holds 2: lower --tp$"):
        require_room_here([_node("10.0.0.1", 2)], num_ranks=4, bundle=GPU_RANK)
    words = r"36 x \{CPU: 1\} wanted, .* holds 16: lower --replicas or --tp, or .* --local-num-cpus 36$"
    with pytest.raises(CapacityError, match=words):
        require_room_here([_node("10.0.0.1", 0)], num_ranks=18, bundle={"CPU": 1.0}, num_gangs=2)


def test_room_where_no_node_joins_is_made_of_shared_cores() -> None:
    result = check_room([_node("here", 0)], num_ranks=18, bundle={"CPU": 1.0}, may_grow=False)
    assert result.status is Status.FAIL
    assert result.sentence.endswith(": lower --tp, or let ranks share cores with --local-num-cpus 18.")
    of_cards = check_room([_node("here", 2)], num_ranks=4, bundle=GPU_RANK, may_grow=False)
    assert of_cards.sentence.endswith(": lower --tp.")


@pytest.mark.parametrize(
    ("size", "ranks", "gang_size", "status"),
    [
        (64 * 2**20, 1, 1, Status.FAIL),
        (0, 1, 1, Status.FAIL),
        (GIB, 1, 1, Status.OK),
        (GIB, 2, 2, Status.WARN),
        (GIB, 1, 2, Status.OK),
        (GIB, 4, 1, Status.OK),  # replicas of one rank each have no memory between them
        (4 * GIB, 4, 2, Status.WARN),
        (12 * GIB, 8, 8, Status.OK),
    ],
)
def test_shared_memory(size: int, ranks: int, gang_size: int, status: Status) -> None:
    result = check_shared_memory("10.0.0.1", size, local_ranks=ranks, gang_size=gang_size)
    assert result.status is status
    assert f"{size // 2**20} MiB" in result.sentence
    if status is not Status.OK:
        assert "--shm-size" in result.sentence
        assert "shm.worker" in result.sentence


def test_shared_memory_of_this_host_is_read() -> None:
    assert local_size() == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize


def test_port_taken_and_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = check_port("grpc port", "127.0.0.1", port)
    assert result.status is Status.FAIL
    assert f"127.0.0.1:{port} is taken" in result.sentence
    assert check_port("grpc port", "127.0.0.1", port).status is Status.OK
    assert check_port("grpc port", "127.0.0.1", 0).status is Status.OK


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_port_of_another_host(host: str) -> None:
    result = check_port("grpc port", host, 50051)
    assert result.status is Status.FAIL
    assert f"{host} is no address of this host" in result.sentence


def test_model_directory(tmp_path: Path) -> None:
    drafter = check_model_directory(str(tmp_path / "nowhere"), node="10.0.0.2", tokenizer=False)
    assert "every node that runs a rank needs the drafter at the same path" in drafter.sentence
    missing = check_model_directory(str(tmp_path / "nowhere"), node="10.0.0.2")
    assert missing.status is Status.FAIL
    assert f"no directory {tmp_path / 'nowhere'} on node 10.0.0.2" in missing.sentence

    (tmp_path / "config.json").write_text("{}")
    shards = [f"model-0000{n}-of-00007.safetensors" for n in range(1, 8)]
    index = {"weight_map": {f"tensor{n}": shard for n, shard in enumerate(shards)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / shards[0]).touch()
    partial = check_model_directory(str(tmp_path), node="10.0.0.2")
    assert partial.status is Status.FAIL
    assert f"lacks tokenizer.json, {shards[1]}, {shards[2]}, {shards[3]} and 3 more" in partial.sentence
    (tmp_path / "tokenizer.json").touch()
    assert check_model_directory(str(tmp_path), node="10.0.0.2", weights=False).status is Status.OK
    assert check_model_directory(str(tmp_path), node=None, weights=False).sentence.endswith(
        "on this machine is complete."
    )

    for shard in shards:
        (tmp_path / shard).touch()
    (tmp_path / "tokenizer.json").unlink()
    assert check_model_directory(str(tmp_path), node="10.0.0.2", tokenizer=False).status is Status.OK
    (tmp_path / "tokenizer.json").touch()
    assert check_model_directory(str(tmp_path), node="10.0.0.2").status is Status.OK


@pytest.mark.parametrize("index", [b"{", b"[]", b"{}", b'{"weight_map": "x"}', b'{"weight_map": {"a": 5}}', b"\xff"])
def test_a_damaged_index_is_a_sentence(index: bytes, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    found = check_model_directory(str(tmp_path), node="10.0.0.2")
    assert found.status is Status.FAIL
    assert f"on node 10.0.0.2: {tmp_path}/model.safetensors.index.json" in found.sentence


def test_a_directory_of_another_format_is_told_apart(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model-Q4_K_M.gguf"):
        (tmp_path / name).touch()
    found = check_model_directory(str(tmp_path), node="10.0.0.2")
    assert found.status is Status.FAIL
    assert "lacks model.safetensors" in found.sentence
    assert "GGUF (model-Q4_K_M.gguf) is not read" in found.sentence


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (
            "gemray-tiny-assistant",
            "architectures ['Gemma4AssistantForCausalLM']) is not allowed: a Gemma 4 model",
        ),
        (
            "gemray-tiny-dflash",
            "architectures ['DFlashDraftModel']) is not allowed: a Gemma 4 model: this",
        ),
    ],
)
def test_a_drafter_in_the_models_place_is_told_from_a_copy_that_is_not_complete(name: EmbeddedName, what: str) -> None:
    drafter = str(embedded_path(name))
    found = check_model_directory(drafter, node="10.0.0.2")
    assert found.status is Status.FAIL
    assert f"on node 10.0.0.2: model = {drafter} (model_type " in found.sentence
    assert what in found.sentence
    assert "--drafter takes it" in found.sentence
    assert check_model_directory(drafter, node="10.0.0.2", tokenizer=False).status is Status.OK


def test_interface_is_the_one_of_the_node_and_says_why() -> None:
    result = check_interface("127.0.0.1", {}, existing=list(psutil.net_if_addrs()))
    assert result.status is Status.OK
    assert "lo holds the node's address 127.0.0.1" in result.sentence


def test_interface_set_by_hand() -> None:
    names = list(psutil.net_if_addrs())
    kept = check_interface("127.0.0.1", {"NCCL_SOCKET_IFNAME": "lo"}, existing=names)
    assert kept.status is Status.OK
    assert "NCCL_SOCKET_IFNAME=lo" in kept.sentence
    wrong = check_interface("127.0.0.1", {"GLOO_SOCKET_IFNAME": "ib7"}, existing=names)
    assert wrong.status is Status.FAIL
    assert "GLOO_SOCKET_IFNAME=ib7 names no interface" in wrong.sentence
    assert "lo" in wrong.sentence
    excluding = check_interface("127.0.0.1", {"NCCL_SOCKET_IFNAME": "^docker0"}, existing=names)
    assert excluding.status is Status.OK


def test_interface_is_that_of_the_ranks_not_of_the_node_s_ray() -> None:
    """Ray on the node knows nothing of what the server's user has set, which the ranks get."""
    checkpoints = Checkpoints(str(embedded_path("gemray-tiny")), drafters=())

    def found(**forwarded: str) -> CheckResult:
        results = check_this_node("203.0.113.7", checkpoints, local_ranks=1, gang_size=1, forwarded=forwarded)
        return next(result for result in results if result.name == "interface")

    assert found().status is Status.FAIL
    assert found(NCCL_SOCKET_IFNAME="lo").status is Status.FAIL, "gloo has none"
    both = found(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    assert (both.status, both.node) == (Status.OK, "203.0.113.7")
    assert "kept as set" in both.sentence


def test_no_interface_holds_the_address() -> None:
    result = check_interface("203.0.113.7", {}, existing=list(psutil.net_if_addrs()))
    assert result.status is Status.FAIL
    assert "203.0.113.7" in result.sentence
    assert "127.0.0.1 (lo)" in result.sentence


def test_only_failures_stop_a_start() -> None:
    results = [ok("a", "fine."), fail("b", "bad.")]
    assert failed(results) == [results[1]]
    assert str(results[1]) == "fail  b: bad."


def test_a_snapshot_that_is_not_there_comes_with_the_command_that_brings_it(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--google--gemma" / "snapshots" / ("a" * 40)
    command = f"`hf download google/gemma --revision {'a' * 40}`"
    missing = check_model_directory(str(snapshot), node="10.0.0.2")
    assert missing.status is Status.FAIL
    assert f"in its Hugging Face cache, or at the same path: run {command} there" in missing.sentence
    snapshot.mkdir(parents=True)
    partial = check_model_directory(str(snapshot), node="10.0.0.2")
    assert f"the copy is not complete; {command} brings the rest" in partial.sentence
