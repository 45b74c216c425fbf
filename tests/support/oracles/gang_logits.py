"""Logits of a model that is sharded over a gang."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gemray_kernels.numerics import Numerics
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.shard_indices import ShardIndices
from support.oracles.oracle import load_model, loaded_model
from support.oracles.paged import PagedCache, Rows


def logits_on_rank(
    comm: Communicator,
    directories: list[Path],
    prompt: list[int],
    dtype: torch.dtype = torch.float64,
    numerics: Numerics = Numerics.FAST,
) -> list[Tensor]:
    """Logits by id [len(prompt), vocab_size] of each checkpoint, gathered; the prompt in two chunks."""
    return [_logits(comm, load_model(directory, comm, dtype, numerics), prompt) for directory in directories]


def quantized_logits_on_rank(
    comm: Communicator,
    directories: list[Path],
    prompt: list[int],
    dtype: torch.dtype = torch.float64,
    numerics: Numerics = Numerics.FAST,
) -> list[Tensor]:
    """The same of checkpoints that need the loader."""
    return [_logits(comm, loaded_model(directory, comm, dtype, numerics), prompt) for directory in directories]


def _logits(comm: Communicator, model: TargetModel, prompt: list[int]) -> Tensor:
    cache = PagedCache(model.config, num_sequences=1, max_len=len(prompt), dtype=model.dtype, tp_size=comm.size)
    half = len(prompt) // 2
    hidden = [
        model.forward(cache.batch([Rows(0, part, start)]), cache.caches).hidden_UH
        for part, start in ((prompt[:half], 0), (prompt[half:], half))
    ]
    gathered = comm.all_gather(model.logits(torch.cat(hidden)))
    by_id = gathered.new_full((len(prompt), model.config.vocab_size), torch.nan)
    for rank, columns in enumerate(gathered):
        shard = ShardIndices.of_rank(
            rank, comm.size, org_vocab_size=model.config.org_vocab_size, num_added=model.config.num_added
        )
        ids = shard.global_ids()
        assert torch.isneginf(columns[:, ids < 0]).all()
        by_id[:, ids[ids >= 0]] = columns[:, ids >= 0]
    return by_id
