"""The learning-rate schedule of all trainers, and batches of the target's continuations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

WARM_UP = 100


def rate(step: int, progress: float, decay_from: float = 0.35) -> float:
    """Warm up, hold, decay linearly to nothing as `progress` goes from `decay_from` to 1."""
    return min(1.0, (step + 1) / WARM_UP, max(0.0, (1 - progress) / (1 - decay_from)))


class Continuations:
    """Rows the target wrote (stage 3), shuffled anew every pass; `split` cuts long rows into shorter ones."""

    def __init__(self, path: Path, device: torch.device, seed: int, split: int = 0) -> None:
        arrays = np.load(path)
        width = split or arrays["ids"].shape[1]
        self.ids = torch.from_numpy(arrays["ids"].astype(np.int16)).to(device).view(-1, width)
        self.own = torch.from_numpy(arrays["own"]).to(device).view(-1, width)
        self.rng = torch.Generator().manual_seed(seed)
        self.order, self.at = torch.randperm(len(self.ids), generator=self.rng), 0

    def draw(self, count: int, width: int) -> tuple[Tensor, Tensor]:
        """([count, width] ids, [count, width] 'the target's own token')."""
        if self.at + count > len(self.order):
            self.order, self.at = torch.randperm(len(self.ids), generator=self.rng), 0
        pick = self.order[self.at : self.at + count].to(self.ids.device)
        self.at += count
        return self.ids[pick, :width].long(), self.own[pick, :width]
