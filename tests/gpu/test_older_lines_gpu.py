"""What attention reads before it waits is what was written last, whatever its multiprocessor's own cache holds.

Tables are older than the last anchor then. But nothing promises a kernel that starts early an empty cache: where no
kernel had a program since they were written, it may hold what lay there before. Kernels with little shared memory may
find it emptied all the same, as a cache is cut anew.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.engine.gpu import needs_gpus

pytestmark = pytest.mark.gpu

PAGE = 16
COLUMNS = 64
KINDS = {
    "all keys, wide heads": (8, 2, 512, None, [700, 1000]),
    "a window, few programs": (8, 2, 256, 512, [700, 1000]),
    "a window, a program for each multiprocessor": (32, 16, 256, 1024, [300 + 60 * i for i in range(9)]),
    "all keys": (8, 2, 256, None, [700, 1000]),
}
"""Query heads, KV heads, head dim, window, and the keys of sequences of one row."""
REPLAYS = 20


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_that_were_written_last(kind: str) -> None:
    needs_gpus(1)
    from gemray_kernels.triton.paged_attention import paged_attention
    from support.kernels.older_lines import laid_side_by_side, read_everywhere, write_early

    heads, kv_heads, head_dim, window, keys = KINDS[kind]
    num_seqs = len(keys)
    generator = torch.Generator("cuda").manual_seed(head_dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    k_pages, v_pages = (random(num_seqs * COLUMNS, PAGE, kv_heads, head_dim) for _ in range(2))
    query = random(num_seqs, heads, head_dim)
    order = torch.randperm(num_seqs * COLUMNS, generator=generator, device="cuda").int()
    starts = torch.arange(num_seqs + 1, device="cuda", dtype=torch.int32)
    lengths = torch.tensor(keys, device="cuda", dtype=torch.int32)
    newer = laid_side_by_side([order, starts, lengths])
    older = laid_side_by_side([order.flip(0), starts, lengths // 2])
    held = newer.clone()
    table, query_start, kv_len = held.split([len(order), num_seqs + 1, num_seqs])

    def attended() -> Tensor:
        table_SP = table.view(num_seqs, COLUMNS)
        return paged_attention(
            query, k_pages, v_pages, table_SP, query_start, kv_len, window=window, causal=True, scale=0.1, most_rows=1
        )

    expected = attended()
    held.copy_(older)
    assert not torch.equal(attended(), expected)

    def cycle() -> Tensor:
        held.copy_(older)
        read_everywhere(held)
        for _ in range(3):
            write_early(held, newer)
        return attended()

    cycle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cycle()
    differing = 0
    for _ in range(REPLAYS):
        graph.replay()
        differing += not torch.equal(found, expected)
    assert not differing, f"{differing} of {REPLAYS} replays"
