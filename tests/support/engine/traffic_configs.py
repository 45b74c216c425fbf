"""The engines that are put under mixed traffic, and what must hold of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gemray_workers.config import DeviceName, EngineConfig
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config
from support.engine.scarce_memory import least_memory
from support.engine.traffic import MIB, TrafficReport

MAX_MODEL_LEN = 96
KV_BYTES = 64 * MIB
ROOM = {"cpu": 1.4, "cuda": 2.0}
"""Times the memory of one sequence of full length: sequences push each other out."""
DEVICE_GROWTH = 2 * MIB
HOST_GROWTH = 64 * MIB


@dataclass(frozen=True)
class Served:
    """One engine."""

    shape: Shape
    tp: int
    drafter: Literal["none", "mtp", "dflash"] = "none"
    placement: Literal["colocated", "dedicated"] = "colocated"

    @property
    def num_ranks(self) -> int:
        """Ranks of the gang, a dedicated drafter's included."""
        return self.tp + (self.placement == "dedicated")


CONFIGS = {
    "tp1": Served("31B", 1),
    "tp2-mtp": Served("31B", 2, "mtp"),
    "tp2-dflash-experts": Served("26B-A4B", 2, "dflash"),
    "dedicated": Served("31B", 1, "dflash", "dedicated"),
}


def traffic_config(name: str, device: DeviceName) -> EngineConfig:
    """The engine of that name: float64 on CPU, float32 with all graphs captured at start on CUDA."""
    served = CONFIGS[name]
    target = tiny_checkpoint(served.shape)
    paths: dict[str, Path] = {}
    if served.drafter != "none":
        paths["drafter_path"] = tiny_assistant(target) if served.drafter == "mtp" else tiny_dflash(target)
    changes: dict[str, Any] = {key: str(path) for key, path in paths.items()}
    config = engine_config(
        target,
        device=device,
        dtype="float64" if device == "cpu" else "float32",
        tensor_parallel_size=served.tp,
        drafter_placement=served.placement,
        num_draft_tokens=4 if paths else None,
        kv_memory_bytes=KV_BYTES,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4 if device == "cpu" else 8,
        max_step_tokens=64,
        prefill_chunk=24,
        lag=1 if served.placement == "colocated" else 0,
        **changes,
    )
    return replace(config, kv_memory_bytes=int(ROOM[device] * least_memory(config)))


def traffic_faults(reports: list[TrafficReport]) -> list[str]:
    """What did not hold, in words; `reports` by rank."""
    lead = reports[0]
    found = [f"{m.request}: other ids from token {m.position} on: {m.found} for {m.expected}" for m in lead.mismatches]
    found += lead.faults
    if not lead.finished:
        found.append("no request finished")
    if any(lead.pages_left.values()):
        found.append(f"pages in use when all was over: {lead.pages_left}")
    if not 1 < lead.most_at_first == lead.most_at_last:
        found.append(f"{lead.most_at_last} sequences at one time in the end, {lead.most_at_first} at first")
    for rank, report in enumerate(reports):
        if report.compiled:
            found.append(f"rank {rank}: {report.compiled} Triton programs were compiled while serving")
            found += report.compiled_names
        device, host = report.growth(report.device_bytes), report.growth(report.host_bytes)
        if device > DEVICE_GROWTH:
            found.append(f"rank {rank}: memory of the card grew by {device / MIB:.1f} MiB: {report.device_bytes}")
        if host > HOST_GROWTH:
            found.append(f"rank {rank}: memory of the host grew by {host / MIB:.1f} MiB: {report.host_bytes}")
    return found
