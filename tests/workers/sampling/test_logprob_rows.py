"""Log-probabilities of many rows: those of each row alone, with working memory of a few rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.logprobs import token_logprobs

NUM_ROWS, VOCAB_SIZE = 75, 320


class LargestInteger(TorchDispatchMode):
    """Remembers how many numbers the largest tensor of int64 had that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.int64:
            self.numel = max(self.numel, made.numel())
        return made


def test_many_rows_are_searched_a_few_at_a_time() -> None:
    generator = torch.Generator().manual_seed(3)
    shard = ShardIndices.of_rank(0, 1, org_vocab_size=VOCAB_SIZE)
    logits_RV = torch.randint(0, 9, (NUM_ROWS, VOCAB_SIZE), generator=generator).float()
    ids_R = torch.randint(0, VOCAB_SIZE, (NUM_ROWS,), generator=generator)
    with LargestInteger() as largest:
        together = token_logprobs(logits_RV, ids_R, 4, shard, SoloCommunicator()).listed()
    alone = [
        token_logprobs(logits_RV[row : row + 1], ids_R[row : row + 1], 4, shard, SoloCommunicator()).listed()[0]
        for row in range(NUM_ROWS)
    ]
    assert together == alone
    assert largest.numel <= NUM_ROWS * VOCAB_SIZE // 2
