"""Attention's memory between kernels: how much a rank sets aside, and that target and drafters share it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gemray_workers.attention.kernels import attention_kernel
from gemray_workers.config import EngineConfig
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank import target_rank
from gemray_workers.rank.attention_memory import attention_scratch, attention_scratch_bytes
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.memory import MemoryNeeds
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config
from support.engine.gpu import CONFIGS

MIB = 1 << 20


def blueprint(shape: str, **changes: Any) -> Blueprint:
    """A server with no setting but these, and an MTP assistant."""
    settings: dict[str, Any] = {"tensor_parallel_size": 1, "device": "cuda", **changes}
    return Blueprint.of(
        EngineConfig(
            model_path=str(CONFIGS / f"{shape}-it"),
            drafter_path=str(CONFIGS / f"{shape}-it-assistant"),
            dtype="bfloat16",
            random_weights=True,
            **settings,
        )
    )


@pytest.mark.parametrize(
    ("shape", "changes", "mib"),
    [
        # Rows of the largest step, query heads, chunks, head dim and its two numbers beside, 4 bytes each.
        ("31B", {}, 512 * 32 * 32 * 514 * 4 / MIB),
        ("31B", {"tensor_parallel_size": 2}, 800 * 16 * 32 * 514 * 4 / MIB),
        ("26B-A4B", {}, 33 * 32 * 16 * 32 * 514 * 4 / MIB),
        ("E4B", {}, 33 * 32 * 8 * 32 * 514 * 4 / MIB),
        # A prompt's weights are more where few sequences run.
        ("26B-A4B", {"max_num_seqs": 1}, 305),
        ("26B-A4B", {"device": "cpu"}, 0),
        ("26B-A4B", {"attention_backend": "torch"}, 0),
    ],
)
def test_what_a_rank_sets_aside(shape: str, changes: dict[str, Any], mib: float) -> None:
    drawn = blueprint(shape, **changes)
    assert attention_scratch_bytes(drawn) / MIB == pytest.approx(mib, abs=0.5)
    found = attention_scratch(drawn, torch.device("meta"))
    assert (0 if found is None else found.numel()) == attention_scratch_bytes(drawn)
    work = MemoryNeeds.of(drawn).work
    assert attention_scratch_bytes(drawn) < work < attention_scratch_bytes(drawn) + 300 * MIB


@pytest.mark.parametrize("drafter", [tiny_assistant, tiny_dflash])
def test_target_and_drafter_share_it(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.empty(16, dtype=torch.uint8)
    given: list[Tensor | None] = []

    def kernel(choice: Any, numerics: Any = None, scratch: Tensor | None = None) -> Any:
        given.append(scratch)
        return attention_kernel(choice)

    monkeypatch.setattr(target_rank, "attention_scratch", lambda *_: memory)
    monkeypatch.setattr(target_rank, "attention_kernel", kernel)
    directory = tiny_checkpoint("31B")
    EngineRank(engine_config(directory, drafter_path=str(drafter(directory))), SoloCommunicator(), torch.device("cpu"))
    assert len(given) == 2
    assert all(scratch is memory for scratch in given)
