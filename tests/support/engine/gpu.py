"""Engines on GPUs for tests: each rank of a gloo gang joins a second gang over NCCL, on a card of its own."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from gemray_workers.config import EngineConfig
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator, join_gang
from gemray_workers.rank.drafter_rank import DrafterRank
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.tiny import Shape
from support.engine.engine_runner import Run, engine_config, serve

CONFIGS = Path(__file__).resolve().parents[3] / "benchmarks" / "configs"
LAYERS = 12
"""Layers of the published shapes in tests: two periods of sliding and full layers."""


def needs_gpus(count: int) -> None:
    """Skip the test on a machine with fewer cards."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, {torch.cuda.device_count()} are here")


def published_config(shape: Shape, method: str, directory: Path, **changes: Any) -> EngineConfig:
    """bfloat16 random weights of a published shape, cut to `LAYERS` layers if it shares no KV, with its drafter.

    Configs of the shortened models are written under `directory`.
    """
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "device": "cuda",
        "kv_memory_bytes": 4 << 30,
        "max_step_tokens": 512,
        "page_size": 16,
        "random_weights": True,
        **changes,
    }
    suffix = {"mtp": "-assistant", "dflash": "-DFlash"}
    if method != "none":
        settings["drafter_path"] = str(_shortened(f"{shape}-it{suffix[method]}", directory))
    return engine_config(_shortened(f"{shape}-it", directory), **settings)


def _shortened(name: str, directory: Path) -> Path:
    config = json.loads((CONFIGS / name / "config.json").read_text())
    if "dflash_config" in config:
        config["num_target_layers"] = LAYERS
        count = len(config["dflash_config"]["target_layer_ids"])
        config["dflash_config"]["target_layer_ids"] = [1 + i * (LAYERS - 3) // (count - 1) for i in range(count)]
    elif "backbone_hidden_size" not in config and not config["text_config"]["num_kv_shared_layers"]:
        config["text_config"]["num_hidden_layers"] = LAYERS
        config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:LAYERS]
    path = directory / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def join_on_gpu(comm: Communicator, timeout_s: float = 60.0) -> TorchCommunicator:
    """Card `comm.rank` is this rank's."""
    torch.cuda.set_device(comm.rank)
    rendezvous = None
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}".encode()
    address = comm.broadcast_bytes(rendezvous).decode()
    return join_gang(comm.rank, comm.size, address, device="cuda", timeout_s=timeout_s)


def run_on_gpus(comm: Communicator, config: EngineConfig, submits: list[Submit]) -> Run | None:
    """On every rank of a gang of `config.gang_size`: load, serve, leave. Rank 0 returns the results."""
    device = torch.device("cuda", comm.rank)
    torch.cuda.set_device(device)
    if comm.size == 1:
        return serve(EngineRank(config, SoloCommunicator(), device), SoloCommunicator(), submits)
    gang = join_on_gpu(comm)
    try:
        return _serve(gang, config, device, submits)
    finally:
        torch.cuda.synchronize()
        gang.close()


def _serve(gang: TorchCommunicator, config: EngineConfig, device: torch.device, submits: list[Submit]) -> Run | None:
    if config.drafter_placement == "colocated":
        return serve(EngineRank(config, gang, device), gang, submits)
    if gang.rank == config.tensor_parallel_size:
        DrafterRank(config, gang, device).engine().run()
        return None
    target: Any = gang.subgroup(config.tensor_parallel_size, "target")
    return serve(EngineRank(config, target, device, gang=gang), target, submits)
