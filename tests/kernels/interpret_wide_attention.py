"""Run by `test_wide_attention` in a process of its own: items cover all keys once, and chunks combine to the softmax.

Prints what is wrong, and how many cases there were.
"""

from __future__ import annotations

import random
from collections import Counter

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemray_kernels.reference.paged_attention import paged_attention
from gemray_kernels.triton.wide_spans import combine_chunks_kernel, item_of, items_of
from support.kernels.kernel_parity import AttentionCase, relative_error

MOST_CHUNKS = 8
FIELDS = 9
CASES = (
    ([(1, 1), (1, 64), (1, 65), (3, 0), (1, 2000)], 1, 2, (3, 4)),
    ([(5, 700), (2, 130), (16, 16), (9, 4), (7, 0)], 4, 1, (1, 2)),
    ([(1, 5000)], 1, 4, (8, 100)),
    ([(5, 300 + 37 * i) for i in range(9)], 8, 2, (1, 16)),
)
"""(rows, keys) of sequences, rows of an item, KV heads, fewest chunks and usual tiles."""


@triton.jit  # type: ignore[untyped-decorator]
def _list_items(  # type: ignore[no-untyped-def]
    found, query_start_Z, kv_len_S, num_seqs, fewest, usual, MOST: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr
):
    items, num_items = items_of(
        tl.arange(0, 16), (query_start_Z, kv_len_S, num_seqs), (fewest, usual, MOST), ROWS, HEADS
    )
    tl.store(found, num_items)
    for i in range(num_items):
        of_sequence, place, span = item_of(i, items, (fewest, usual, MOST), ROWS, HEADS)
        at = found + 1 + i * 9
        tl.store(at, of_sequence[0])
        tl.store(at + 1, of_sequence[1])
        tl.store(at + 2, of_sequence[2])
        tl.store(at + 3, of_sequence[3])
        tl.store(at + 4, place[0])
        tl.store(at + 5, place[1])
        tl.store(at + 6, place[2])
        tl.store(at + 7, span[0])
        tl.store(at + 8, span[1])


def main() -> None:
    """Each case of the list, and some at random."""
    torch.set_num_threads(1)
    chance = random.Random(0)
    at_random = [
        (
            [(chance.randint(1, 17), chance.choice((0, 1, 63, 500, chance.randint(0, 3000)))) for _ in range(7)],
            chance.choice((1, 2, 8)),
            chance.choice((1, 2)),
            (chance.randint(1, MOST_CHUNKS), chance.randint(1, 9)),
        )
        for _ in range(4)
    ]
    cases = [*CASES, *at_random]
    for number, (lengths, rows, kv_heads, cut) in enumerate(cases):
        for fault in faults(lengths, rows, kv_heads, cut):
            print(f"case {number}: {fault}")
    print(f"{len(cases)} cases")


def faults(lengths: list[tuple[int, int]], rows: int, kv_heads: int, cut: tuple[int, int]) -> list[str]:
    """What is wrong with a batch's items, or with the combination of their softmaxes."""
    case = AttentionCase(lengths, 2 * kv_heads, kv_heads, 16)
    q_TND, k_pages, v_pages, table_SP, start_Z, kv_len_S = case.batch(torch.float32, "cpu", seed=1)
    found = torch.full((1 + 4000 * FIELDS,), -1, dtype=torch.int32)
    _list_items[(1,)](found, start_Z, kv_len_S, len(lengths), *cut, MOST=MOST_CHUNKS, ROWS=rows, HEADS=kv_heads)
    items = found[1 : 1 + int(found[0]) * FIELDS].view(-1, FIELDS).tolist()
    wrong = []
    seen: Counter[tuple[int, int, int, int]] = Counter()
    for sequence, first, num_rows, num_keys, row, kv_head, chunk, begin, end in items:
        if (num_rows, num_keys) != lengths[sequence] or first != int(start_Z[sequence]) or row % rows:
            wrong.append(f"item {sequence, first, num_rows, num_keys, row} of other rows")
        if chunk >= MOST_CHUNKS or begin % 64 or begin >= end:
            wrong.append(f"chunk {chunk} of keys {begin} to {end}")
        seen.update((sequence, row, kv_head, key) for key in range(begin, end))
    expected = Counter(
        (s, row, head, key)
        for s, (num_rows, num_keys) in enumerate(lengths)
        for row in range(0, num_rows, rows)
        for head in range(kv_heads)
        for key in range(num_keys)
    )
    if seen != expected:
        wrong.append(f"{sum((seen - expected).values())} keys too many, {sum((expected - seen).values())} missing")
    out_TND = torch.full_like(q_TND, torch.nan)
    partial_o, partial_ml = _attended(case, q_TND, k_pages, v_pages, table_SP, items, rows)
    combine_chunks_kernel[(len(q_TND), case.heads)](
        out_TND, partial_o, partial_ml, start_Z, kv_len_S, len(lengths), *cut, MOST_CHUNKS=MOST_CHUNKS,
        NUM_HEADS=case.heads, HEAD_DIM=16, BLOCK_S=16, BLOCK_C=MOST_CHUNKS, EARLY=False,
    )  # fmt: skip
    whole = paged_attention(q_TND, k_pages, v_pages, table_SP, start_Z, kv_len_S, window=None, causal=True, scale=1.0)
    if not relative_error(out_TND, whole) < 5e-6:
        wrong.append(f"results differ by {relative_error(out_TND, whole):.3g}")
    return wrong


def _attended(
    case: AttentionCase,
    q_TND: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table_SP: Tensor,
    items: list[list[int]],
    rows: int,
) -> tuple[Tensor, Tensor]:
    """What every item leaves for the combination; NaN where none does."""
    group = case.heads // case.kv_heads
    partial_o = torch.full((len(q_TND), case.heads, MOST_CHUNKS, 16), torch.nan)
    partial_ml = torch.full((len(q_TND), case.heads, MOST_CHUNKS, 2), torch.nan)
    for sequence, first, num_rows, num_keys, row, kv_head, chunk, begin, end in items:
        at = torch.arange(begin, end)
        page = table_SP[sequence][at // case.page_size].long()
        k_LD, v_LD = (pages[page, at % case.page_size, kv_head] for pages in (k_pages, v_pages))
        heads = slice(kv_head * group, (kv_head + 1) * group)
        for r in range(row, min(row + rows, num_rows)):
            score_GL = q_TND[first + r, heads] @ k_LD.T / torch.log(torch.tensor(2.0))
            score_GL = score_GL.masked_fill(at > num_keys - num_rows + r, -torch.inf)
            largest_G = score_GL.max(1).values
            weight_GL = torch.exp2(score_GL - largest_G.nan_to_num(neginf=0.0)[:, None])
            partial_o[first + r, heads, chunk] = weight_GL @ v_LD
            partial_ml[first + r, heads, chunk] = torch.stack((largest_G, weight_GL.sum(1)), 1)
    return partial_o, partial_ml


if __name__ == "__main__":
    main()
