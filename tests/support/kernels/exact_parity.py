"""Rows of a prompt attended in every way in which an engine may come to them, compared to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gemray_kernels.fp8_kv import to_fp8
from gemray_workers.model.attention import AttentionKernel
from support.kernels.kernel_parity import K_SCALE, V_SCALE, poisoned_memory

NEIGHBOUR = (3, 40)
"""Rows and keys of another sequence."""


@dataclass(frozen=True)
class ExactCase:
    """One sequence of `keys` keys, the last `rows` of which are queries, in one call and in many."""

    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    window: int | None = None
    gain: float = 1.5
    """Spread of the scores: large ones leave a few keys with all the weight."""
    fp8: bool = False
    cuts: tuple[tuple[int, ...], ...] = ((), (1,))
    """Rows at which the rows are cut into calls; each tuple once. Rows behind the last cut are one call."""

    def differences(self, kernel: AttentionKernel, dtype: torch.dtype, device: str, seed: int) -> Iterator[str]:
        """What differs from the one call, in words: ways to compute rows, and how many numbers of them differ."""
        generator = torch.Generator().manual_seed(seed)
        k_LKD, v_LKD = (torch.randn(self.keys, self.kv_heads, self.head_dim, generator=generator) for _ in range(2))
        q_TND = torch.randn(self.rows, self.heads, self.head_dim, generator=generator)
        q_TND = (q_TND * self.gain / self.head_dim**0.5).to(dtype)
        k_LKD, v_LKD = k_LKD.to(dtype), v_LKD.to(dtype)

        def attend(first: int, last: int, *, shuffle: int = 0, neighbour: bool = False, heads: slice) -> Tensor:
            """Rows `first` to `last` of some KV heads; their keys' pages hold nothing but what the rows may see."""
            before = self.keys - self.rows
            keys = before + last
            q, k, v = (x[:, s] for x, s in ((q_TND[first:last], self._queries(heads)), (k_LKD, heads), (v_LKD, heads)))
            lengths: list[tuple[Tensor, ...]] = [(q, k[:keys], v[:keys])]
            if neighbour:
                other = torch.Generator().manual_seed(seed + 1)
                rows, length = NEIGHBOUR
                more = [torch.randn(n, *x.shape[1:], generator=other) for n, x in ((rows, q), (length, k), (length, v))]
                lengths.insert(0, tuple(x.to(dtype) for x in more))
            batch = self._batch(lengths, shuffle)
            with poisoned_memory():
                out = kernel(
                    *(x.to(device) for x in batch),
                    window=self.window,
                    causal=True,
                    scale=1.0,
                    k_scale=K_SCALE if self.fp8 else 1.0,
                    v_scale=V_SCALE if self.fp8 else 1.0,
                )
            return out[NEIGHBOUR[0] :] if neighbour else out

        everything = slice(0, self.kv_heads)
        whole = attend(0, self.rows, heads=everything)
        if not whole.isfinite().all():
            yield "the whole: not finite"
        for cuts in self.cuts:
            bounds = [0, *cuts, self.rows]
            parts = [attend(a, b, heads=everything) for a, b in pairwise(bounds)]
            if number := int((torch.cat(parts) != whole).sum()):
                yield f"cut at {cuts}: {number} numbers"
        for name, found in (
            ("other pages", attend(0, self.rows, shuffle=7, heads=everything)),
            ("beside another sequence", attend(0, self.rows, neighbour=True, heads=everything)),
            (
                "the last row beside another sequence",
                attend(self.rows - 1, self.rows, neighbour=True, heads=everything),
            ),
        ):
            if number := int((found != whole[-len(found) :]).sum()):
                yield f"{name}: {number} numbers"
        if self.kv_heads > 1:
            last = slice(self.kv_heads - 1, self.kv_heads)
            found = attend(0, self.rows, heads=last)
            if number := int((found != whole[:, self._queries(last)]).sum()):
                yield f"one KV head: {number} numbers"

    def _queries(self, kv_heads: slice) -> slice:
        group = self.heads // self.kv_heads
        return slice(kv_heads.start * group, kv_heads.stop * group)

    def _batch(self, sequences: list[tuple[Tensor, ...]], shuffle: int) -> list[Tensor]:
        """Arguments of a kernel; pages lie in an order of their own, and what no row sees is NaN."""
        pages_each = max(-(-len(k) // self.page_size) for _, k, _ in sequences)
        num_pages = 1 + pages_each * len(sequences)
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(shuffle)) + 1
        table_SP = order.view(len(sequences), pages_each).to(torch.int32)
        q = sequences[0][0]
        pages = torch.full((2, num_pages, self.page_size, *sequences[0][1].shape[1:]), torch.nan, dtype=q.dtype)
        for (q, *keys_and_values), table_P in zip(sequences, table_SP, strict=True):
            length = len(keys_and_values[0])
            first = 0 if self.window is None else max(0, length - len(q) - self.window + 1)
            at = torch.arange(first, length)
            slots = table_P.long()[at // self.page_size] * self.page_size + at % self.page_size
            for target, source in zip(pages, keys_and_values, strict=True):
                target.flatten(0, 1)[slots] = source[first:]
            table_P[: first // self.page_size] = 0  # given back: the null page stands there
        k_pages, v_pages = pages
        if self.fp8:
            k_pages, v_pages = to_fp8(k_pages, K_SCALE), to_fp8(v_pages, V_SCALE)
        num_rows = [len(q) for q, _, _ in sequences]
        return [
            torch.cat([q for q, _, _ in sequences]),
            k_pages,
            v_pages,
            table_SP,
            torch.tensor([0, *num_rows]).cumsum(0).to(torch.int32),
            torch.tensor([len(k) for _, k, _ in sequences], dtype=torch.int32),
        ]


EVERY_ROW = tuple(range(1, 21))
CASES = {
    "every row alone": ExactCase(20, 150, 4, 2, 16, cuts=(EVERY_ROW[:-1],)),
    "every row alone, windowed": ExactCase(20, 150, 4, 2, 16, window=33, cuts=(EVERY_ROW[:-1],), page_size=4),
    "chunks": ExactCase(40, 290, 4, 1, 16, cuts=((1,), (7, 8, 33), (39,))),
    "chunks, windowed": ExactCase(40, 290, 4, 1, 16, window=130, cuts=((1,), (5, 38))),
    "a few keys with all the weight": ExactCase(12, 200, 3, 1, 24, gain=30.0, cuts=((4, 5),)),
    "8-bit pages": ExactCase(6, 170, 4, 2, 16, fp8=True, cuts=((1, 2), (3,))),
    "from the first key": ExactCase(40, 40, 4, 2, 16, cuts=((1, 2), (16, 39))),
}
"""Small ones, for a reference."""

INTERPRETED = {
    "few rows": ExactCase(9, 150, 4, 2, 16, cuts=((1, 2, 6),)),
    "prompts": ExactCase(36, 180, 2, 1, 16, cuts=((1,), (35,))),
    "prompts, windowed": ExactCase(36, 180, 2, 1, 16, page_size=4, window=70, cuts=((1,),)),
    "a few keys with all the weight": ExactCase(3, 150, 3, 1, 24, gain=30.0, cuts=((1,),)),
    "8-bit pages": ExactCase(3, 150, 2, 1, 16, fp8=True, cuts=((1,),)),
}
"""Smaller still, for an interpreter."""
