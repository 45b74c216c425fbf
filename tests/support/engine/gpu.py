"""Engines on GPUs for tests: each rank of a gloo gang joins a second gang over NCCL, on a card of its own.

The target's ranks choose their all-reduce as a server's do: the one-kernel one where it is sound, or NCCL's.

What runs here runs on CPU, too, where the config says so: then the gloo gang itself serves.
"""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from gemray_workers.config import EngineConfig
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.engine.planner import Inbox
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator, join_gang
from gemray_workers.rank.all_reduce import choose_all_reduce
from gemray_workers.rank.compile_ahead import compile_ahead
from gemray_workers.rank.drafter_rank import DrafterRank
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.tiny import Shape
from support.engine.engine_runner import Run, collect, engine_config

InboxT = TypeVar("InboxT", bound=Inbox)

CONFIGS = Path(__file__).resolve().parents[3] / "benchmarks" / "configs"
LAYERS = 12
"""Layers of the published shapes in tests: two periods of sliding and full layers."""


def needs_gpus(count: int) -> None:
    """Skip the test on a machine with fewer cards."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, {torch.cuda.device_count()} are here")


def published_config(shape: Shape, method: str, directory: Path, **changes: Any) -> EngineConfig:
    """bfloat16 random weights of a published shape, cut to `LAYERS` layers or two periods, with its drafter.

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
        settings["drafter_path"] = str(shortened(f"{shape}-it{suffix[method]}", directory))
    return engine_config(shortened(f"{shape}-it", directory), **settings)


def memory_config(
    shape: str, method: str, directory: Path, num_layers: int | None = LAYERS, **changes: Any
) -> EngineConfig:
    """bfloat16 random weights of a published shape as a server would start it, with no memory stated.

    Args:
        shape: of `CONFIGS`.
        method: of its drafter, or none.
        directory: for configs.
        num_layers: to which a shape is cut, or to two periods if it shares KV; None for all.
        changes: fields of the config.
    """
    suffix = {"mtp": "-assistant", "dflash": "-DFlash"}
    settings: dict[str, Any] = {
        "model_path": str(shortened(f"{shape}-it", directory, num_layers)),
        "tensor_parallel_size": 1,
        "dtype": "bfloat16",
        "device": "cuda",
        "random_weights": True,
        **changes,
    }
    if method != "none" and (CONFIGS / f"{shape}-it{suffix[method]}").is_dir():
        settings["drafter_path"] = str(shortened(f"{shape}-it{suffix[method]}", directory, num_layers))
    return EngineConfig(**settings)


def shortened(name: str, directory: Path, num_layers: int | None = LAYERS) -> Path:
    """A config under `directory` of a published model, cut to `num_layers` layers.

    One that shares KV has two periods of sliding and full layers instead, the second on the KV of the first.
    """
    if num_layers is None:
        return CONFIGS / name
    config = json.loads((CONFIGS / name / "config.json").read_text())
    if "dflash_config" in config:
        config["num_target_layers"] = num_layers
        count = len(config["dflash_config"]["target_layer_ids"])
        config["dflash_config"]["target_layer_ids"] = [1 + i * (num_layers - 3) // (count - 1) for i in range(count)]
    elif "backbone_hidden_size" not in config:
        text = config["text_config"]
        if text["num_kv_shared_layers"]:
            period = text["layer_types"].index("full_attention") + 1
            num_layers, text["num_kv_shared_layers"] = 2 * period, period
        text["num_hidden_layers"] = num_layers
        text["layer_types"] = text["layer_types"][:num_layers]
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


def device_of(config: EngineConfig, rank: int) -> torch.device:
    """A rank's device: a card of its own, or the CPU; made the current one."""
    if config.device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


@contextmanager
def gang_of(comm: Communicator, config: EngineConfig) -> Iterator[Any]:
    """The ranks of `comm` as a gang on the config's devices: over NCCL on cards, as they are on CPU.

    What captured graphs must be gone when this ends, in a frame of its own that has returned: NCCL does not let go of a
    group while a graph holds one of its collectives. A gang that failed is left as it is; its processes end.
    """
    if comm.size == 1 or config.device == "cpu":
        yield comm
        return
    gang = join_on_gpu(comm)
    yield gang
    gc.collect()  # models, graphs and engines refer to each other
    torch.cuda.synchronize()
    gang.close()
    torch.cuda.empty_cache()  # the processes stay


def run_engine_on(
    comm: Communicator,
    config: EngineConfig,
    make_inbox: Callable[[torch.device], InboxT],
    *,
    on_start: Callable[[], None] = lambda: None,
    on_step: Callable[[torch.device], None] = lambda _: None,
    warm: bool = False,
) -> InboxT | None:
    """On every rank of a gang of `config.gang_size`: load, serve an inbox to its end, leave. Rank 0 returns the inbox.

    Args:
        comm: of the processes.
        config: of the engine; its device decides where the ranks compute.
        make_inbox: of rank 0, once it has loaded.
        on_start: on each rank, before its first step of serving.
        on_step: on each rank, after each step.
        warm: warm up first, as servers do.
    """
    device = device_of(config, comm.rank)
    with gang_of(comm, config) as gang:
        if config.drafter_placement == "dedicated" and gang.rank == config.tensor_parallel_size:
            _draft_for_others(gang, config, device, on_start, on_step, warm=warm)
            return None
        return _serve_inbox(gang, config, device, make_inbox, on_start, on_step, warm=warm)


def _draft_for_others(
    gang: Any,
    config: EngineConfig,
    device: torch.device,
    on_start: Callable[[], None],
    on_step: Callable[[torch.device], None],
    *,
    warm: bool,
) -> None:
    drafter_rank = DrafterRank(config, gang, device)
    _prepare(drafter_rank, config, device, warm=warm)
    drafter = drafter_rank.engine()
    on_start()
    while drafter.step():
        on_step(device)


def _prepare(rank: EngineRank | DrafterRank, config: EngineConfig, device: torch.device, *, warm: bool) -> None:
    """Warm up as servers do, if that is wanted. A dedicated drafter and its target compile ahead in any case."""
    if device.type == "cuda" and (warm or config.drafter_placement == "dedicated"):
        compile_ahead(rank.rehearsal(), ranks_here=config.gang_size)
    if warm:
        rank.warm_up()


def compile_on_gpus(comm: Communicator, config: EngineConfig) -> None:
    """On every rank of a gang that will serve: compile what it will launch, on all cores, and exchange nothing.

    One program after the other, ranks would keep their cards from other gangs for as long. A dedicated drafter is of a
    gang that has joined, so that nothing is done here.
    """
    if config.device == "cpu" or config.drafter_placement == "dedicated":
        return
    rank = EngineRank(config, comm, device_of(config, comm.rank))
    compile_ahead(rank.rehearsal(), ranks_here=comm.size)
    del rank
    gc.collect()
    torch.cuda.empty_cache()


def _serve_inbox(
    gang: Any,
    config: EngineConfig,
    device: torch.device,
    make_inbox: Callable[[torch.device], InboxT],
    on_start: Callable[[], None],
    on_step: Callable[[torch.device], None],
    *,
    warm: bool,
) -> InboxT | None:
    if config.drafter_placement == "dedicated":
        target = gang.subgroup(config.tensor_parallel_size, "target")
        choose_all_reduce(config, target, device)
        rank = EngineRank(config, target, device, gang=gang)
    else:
        choose_all_reduce(config, gang, device)
        rank = EngineRank(config, gang, device)
    _prepare(rank, config, device, warm=warm)
    inbox = make_inbox(device) if gang.rank == 0 else None
    engine = rank.engine(inbox)
    on_start()
    while engine.step():
        on_step(device)
    return inbox


def run_on_gpus(comm: Communicator, config: EngineConfig, submits: list[Submit], *, warm: bool = False) -> Run | None:
    """On every rank of a gang of `config.gang_size`: load, serve, leave. Rank 0 returns the results."""
    inbox = run_engine_on(comm, config, lambda _: LocalInbox(submits), warm=warm)
    return None if inbox is None else collect(inbox, submits)
