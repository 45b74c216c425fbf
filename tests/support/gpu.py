"""Engines on GPUs for tests: each rank of a gloo gang joins a second gang over NCCL, on a card of its own."""

from __future__ import annotations

import socket
from typing import Any

import torch

from gemray_workers.config import EngineConfig
from gemray_workers.drafters.dedicated.rank import DrafterRank
from gemray_workers.engine.rank import EngineRank
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator, join_gang
from support.engine_runner import Run, serve


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
