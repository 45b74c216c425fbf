"""Checksums of logits: equal numbers have equal ones, however many ranks hold them.

A checksum is a sum over the vocabulary, modulo 2^64, of a hash of an id and its logit's bits. Sums of integers do not
depend on their order, so tensor parallelism does not change it; one bit of one logit does.

Shape legend: R rows, V local vocabulary columns, W of them at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.shard_indices import ShardIndices

MOST_CELLS = 1 << 22
"""Logits that are hashed at one time: their hashes are 8 bytes each, and a step may have hundreds of rows."""
# Odd factors of splitmix64 (Steele, Lea, Flood, 2014), as signed numbers.
_OF_ID = -7046029254386353131
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685


def logits_checksums(logits_RV: Tensor, shard: ShardIndices, comm: Communicator) -> Tensor:
    """The checksum of each row's logits, int64 [R], equal on every rank.

    Args:
        logits_RV: this rank's columns [R, shard.num_elements_padded], float32 or float64; padding does not count.
        shard: this rank's vocabulary.
        comm: the tensor-parallel ranks.
    """
    ids_V = shard.global_ids(logits_RV.device)
    sums = [_sums(rows_WV, ids_V) for rows_WV in torch.split(logits_RV, max(1, MOST_CELLS // max(1, len(ids_V))))]
    local_R = torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64, device=logits_RV.device)
    return comm.all_gather(local_R).sum(dim=0)


def _sums(logits_WV: Tensor, ids_V: Tensor) -> Tensor:
    bits = torch.int32 if logits_WV.dtype == torch.float32 else torch.int64
    hash_WV = _mix(logits_WV.contiguous().view(bits).to(torch.int64) ^ (ids_V + 1) * _OF_ID)
    return hash_WV.masked_fill_(ids_V < 0, 0).sum(dim=-1)


def _mix(x: Tensor) -> Tensor:
    """Let every bit of each number change half of the others: two rounds of shift and multiply."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (x >> by) & ((1 << (64 - by)) - 1)
