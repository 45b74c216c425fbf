"""Where a gang's weights come from: the checkpoint's files, or a seed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Protocol

from gemray_workers.checkpoint.loader import LoadReport, ProgressFn, load_weights
from gemray_workers.checkpoint.random_weights import random_weights
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.config import EngineConfig


class WeightSource(Protocol):
    """Signature of `load_weights`."""

    def __call__(
        self,
        directory: str | os.PathLike[str],
        targets: Iterable[WeightTarget],
        *,
        prefix: str,
        is_ignored: Callable[[str], bool],
        progress: ProgressFn | None = None,
    ) -> LoadReport:
        """Fill every target's destinations."""
        ...


def weight_source(config: EngineConfig) -> WeightSource:
    """What fills the weights of target and drafter alike."""
    return random_weights if config.random_weights else load_weights
