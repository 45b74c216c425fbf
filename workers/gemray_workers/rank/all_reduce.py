"""Which all-reduce the target's ranks take: the one-kernel one where it is sound, or the library's."""

from __future__ import annotations

import torch

from gemray_workers.config import EngineConfig
from gemray_workers.parallel.communicator import Communicator, compute_dtype
from gemray_workers.parallel.one_shot import use_one_shot_if_sound


def reduced_dtypes(config: EngineConfig) -> list[torch.dtype]:
    """The dtypes that ranks add up over each other."""
    return sorted({config.torch_dtype, compute_dtype(config.torch_dtype)}, key=str)


def choose_all_reduce(config: EngineConfig, target: Communicator, device: torch.device) -> None:
    """Let the target's ranks take what the config asks for; every one of them calls this.

    Args:
        config: of the gang.
        target: its target's ranks, without a dedicated drafter's.
        device: of this rank.
    """
    if config.all_reduce == "auto":
        use_one_shot_if_sound(target, device, reduced_dtypes(config))
