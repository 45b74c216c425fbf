"""Run by `test_one_shot_programs` in a process of its own: ranks that are processes add up over memory that they share.

Prints every sum that has other bits than expected, and how many there were. In float32: the interpreter does not round
to bfloat16 as a card does.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.queues import Queue

import torch
from torch import Tensor

from gemray_kernels.reference.layer_norms import total
from gemray_kernels.triton import one_shot_reduce
from support.kernels.quick_interpreter import patch_language_once

TURNS = 60
BLOCK_BYTES = 64
one_shot_reduce.BLOCK_BYTES = BLOCK_BYTES
one_shot_reduce.MOST_BYTES = 16 * BLOCK_BYTES
one_shot_reduce.TRIES = 20_000


def parts_of(rank: int, turn: int) -> Tensor:
    """What a rank gives at a turn: [parts, elements], as many on every rank; few blocks and many, whole or not."""
    chance = random.Random(turn)
    shape = chance.choice((1, 1, 2)), chance.choice((1, 3, 16, 32, 33, 64, 80))
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * turn + rank))


def expected(size: int, turn: int) -> Tensor:
    """The sum of each rank's sum."""
    of_ranks = [total(parts_of(rank, turn), torch.float32) for rank in range(size)]
    return total(torch.stack(of_ranks), torch.float32)


def add_up(rank: int, size: int, memory_RW: Tensor, wrong: Queue[str]) -> None:
    """All turns of one rank; ranks are quick and slow by turns, so that each is a turn ahead now and then."""
    chance = random.Random(rank)
    addresses = torch.tensor([memory_RW[r].data_ptr() for r in range(size)])
    reduce = one_shot_reduce.OneShotReduce(rank, size, addresses)
    for turn in range(TURNS):
        if chance.random() < 0.3:
            time.sleep(0.02)
        parts = parts_of(rank, turn)
        if not torch.equal(reduce.of_parts(parts, parts.dtype), expected(size, turn)):
            wrong.put(f"{size} ranks, rank {rank}, turn {turn}")


def main() -> None:
    """Gangs of one to four ranks."""
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")  # children see the memory at its address
    for size in (1, 2, 3, 4):
        memory_RW = torch.zeros(size, one_shot_reduce.memory_words(size), dtype=torch.int32).share_memory_()
        wrong: Queue[str] = fork.Queue()
        ranks = [fork.Process(target=add_up, args=(rank, size, memory_RW, wrong)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            assert rank.exitcode == 0
        while not wrong.empty():
            print(wrong.get())
        print(f"{size} ranks: {TURNS} turns")


if __name__ == "__main__":
    patch_language_once()
    main()
