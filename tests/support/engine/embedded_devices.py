"""The embedded family on one device and dtype beside another: texts, near ties, acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemray_workers.config import DeviceName, DTypeName, EngineConfig
from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import SoloCommunicator
from support.engine.engine_runner import Run, engine_config
from support.engine.gpu import run_on_gpus
from support.engine.held_out_requests import held_out_requests
from support.engine.near_ties import Parting, partings, told

TARGET = embedded_path("gemray-tiny")
DRAFTERS: tuple[EmbeddedName, ...] = ("gemray-tiny-assistant", "gemray-tiny-assistant-centroid", "gemray-tiny-dflash")
NEAR_TIE: dict[DTypeName, float] = {"float64": 0.0, "float32": 1e-3, "bfloat16": 0.5}
"""Most nats between two tokens where texts part: bfloat16 keeps 8 bits, and logits of 16 to 32 are an eighth apart.
On a CPU 33 of 96 texts of 64 tokens parted from float32's, at gaps of up to 0.31 (MTP)."""
ACCEPTANCE = 0.02
"""Most by which tokens a round may differ, relatively."""


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same requests."""

    line: str
    """In words."""
    partings: list[Parting]
    lengths: tuple[float, float]
    """Tokens a round, the target's own included, of the first run and the second; 1 without a drafter."""

    @property
    def acceptance_differs_by(self) -> float:
        """Relative to the first run."""
        return abs(self.lengths[1] / self.lengths[0] - 1)


def texts(count: int, max_tokens: int) -> list[Submit]:
    """Greedy requests for held-out prompts, with the log-probabilities that show near ties."""
    return held_out_requests(count, max_tokens, logprobs=20)


def family_config(drafter: EmbeddedName | None, device: DeviceName, dtype: DTypeName, **changes: Any) -> EngineConfig:
    """An engine of the family."""
    if drafter is not None:
        changes["drafter_path"] = str(embedded_path(drafter))
    return engine_config(
        TARGET, device=device, dtype=dtype, page_size=16, max_model_len=512, max_num_seqs=32, max_step_tokens=1024,
        prefill_chunk=128, kv_memory_bytes=256 << 20, poison_freed_pages=False, **changes,
    )  # fmt: skip


def family_run(
    drafter: EmbeddedName | None, device: DeviceName, dtype: DTypeName, submits: list[Submit], **changes: Any
) -> Run:
    """Serve the requests on one rank."""
    run = run_on_gpus(SoloCommunicator(), family_config(drafter, device, dtype, **changes), submits)
    assert run is not None
    return run


def compare(name: str, first: Run, second: Run) -> Comparison:
    """Hold the second run against the first."""
    lengths = tuple(1 + r.speculation.accepted / max(1, r.speculation.rounds) for r in (first, second))
    apart = partings(first, second)
    line = f"{told(name, first, second)}; tokens a round {lengths[0]:.4f} and {lengths[1]:.4f}"
    return Comparison(line, apart, (lengths[0], lengths[1]))
