"""Token streams on the device, random training rows, and prompts cut from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .settings import BOS_ID

KINDS = ("code", "prose", "greek", "chat")
WEIGHTS = (0.45, 0.21, 0.11, 0.23)
_TURN, _NEWLINE = 105, 107


class Streams:
    """All kinds in one device tensor, with uniform windows inside a kind drawn by `weights`."""

    def __init__(self, path: Path, device: torch.device, seed: int, weights: Sequence[float] = WEIGHTS) -> None:
        arrays = np.load(path)
        self.arrays = {kind: arrays[kind] for kind in KINDS}
        self.ids = torch.from_numpy(np.concatenate(list(self.arrays.values())).astype(np.int32)).to(device)
        lengths = torch.tensor([len(a) for a in self.arrays.values()], device=device)
        self.lengths, self.starts = lengths, lengths.cumsum(0) - lengths
        self.weights = torch.tensor(weights, device=device)
        self.rng = torch.Generator(device).manual_seed(seed)

    def rows(self, count: int, width: int) -> Tensor:
        """[count, width] int64 rows."""
        kind = torch.multinomial(self.weights, count, replacement=True, generator=self.rng)
        unit = torch.rand(count, device=self.ids.device, generator=self.rng)
        start = self.starts[kind] + (unit * (self.lengths[kind] - width)).long()
        return self.ids[start[:, None] + torch.arange(width, device=self.ids.device)].long()


def model_role(tokenizer_json: Path) -> int:
    """The id of the word 'model', which opens a model turn."""
    return int(json.loads(tokenizer_json.read_text())["model"]["vocab"]["model"])


def chat_prompts(stream: np.ndarray, role: int, longest: int) -> list[np.ndarray]:
    """Every conversation of the chat stream up to its last model turn."""
    starts = np.flatnonzero(stream == BOS_ID)
    turns = np.flatnonzero((stream[:-2] == _TURN) & (stream[1:-1] == role))
    last = np.searchsorted(turns, np.append(starts[1:], len(stream))) - 1
    out = []
    for start, turn in zip(starts, turns[last], strict=True):
        if start < turn and turn + 3 - start <= longest:
            out.append(stream[start : turn + 3])
    return out


def text_prompts(stream: np.ndarray, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """<bos> and 32-128 tokens from the beginning of a line."""
    lines = np.flatnonzero(stream[:-200] == _NEWLINE) + 1
    out = []
    for start, length in zip(rng.choice(lines, count), rng.integers(32, 128, count), strict=True):
        piece = stream[start : start + length]
        cut = np.flatnonzero(piece == BOS_ID)
        out.append(piece[cut[-1] :] if len(cut) else np.concatenate([[BOS_ID], piece]))
    return out


def padded(prompts: list[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """([P, longest] ids, [P] lengths)."""
    out = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
    for i, prompt in enumerate(prompts):
        out[i, : len(prompt)] = torch.from_numpy(np.asarray(prompt, dtype=np.int64))
    return out.to(device), torch.tensor([len(p) for p in prompts], device=device)
