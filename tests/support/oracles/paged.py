"""A minimal paged KV cache and batch builder, to drive a model without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_workers.kv.cache import KVCaches
from gemray_workers.kv.scales import KVScales
from gemray_workers.model.batch import ForwardBatch, GroupMetadata
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.kv_groups import kv_group_specs


@dataclass(frozen=True)
class Rows:
    """Tokens of one sequence to compute, the first at position `start`."""

    sequence: int
    token_ids: Sequence[int]
    start: int


class PagedCache:
    """Pages for a few sequences of bounded length, handed out in a shuffled order; nothing is ever freed.

    Unwritten pages hold NaN, so that a read of a key that was never computed shows.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        num_sequences: int,
        max_len: int,
        dtype: torch.dtype,
        page_size: int = 4,
        tp_size: int = 1,
        device: torch.device | None = None,
        scales: Mapping[int, KVScales] | None = None,
    ) -> None:
        self._page_size = page_size
        self._device = device or torch.device("cpu")
        pages_each = -(-max_len // page_size)
        num_pages = 1 + num_sequences * pages_each
        specs = kv_group_specs(model, tp_size=tp_size, page_size=page_size, dtype=dtype)
        self._block_tables = {}
        pages = {}
        for number, spec in enumerate(specs):
            order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(number)) + 1
            self._block_tables[spec.name] = order.view(num_sequences, pages_each).to(torch.int32)
            shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
            for layer in spec.layers:
                pages[layer] = (self._unwritten(shape, dtype), self._unwritten(shape, dtype))
        donors = {layer.index: layer.kv_donor for layer in model.layers if layer.kv_donor is not None}
        self.caches = KVCaches(specs, pages, donors, scales)

    def _unwritten(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=self._device)

    def batch(self, rows: Sequence[Rows]) -> ForwardBatch:
        """The forward batch of these rows, sequences in the order given."""
        counts = torch.tensor([0] + [len(r.token_ids) for r in rows])
        positions = [torch.arange(r.start, r.start + len(r.token_ids)) for r in rows]
        return ForwardBatch(
            token_ids_T=torch.tensor([t for r in rows for t in r.token_ids], dtype=torch.int64).to(self._device),
            positions_T=torch.cat(positions).to(self._device),
            query_start_Z=counts.cumsum(0).to(self._device, torch.int32),
            kv_len_S=torch.tensor([r.start + len(r.token_ids) for r in rows], dtype=torch.int32).to(self._device),
            groups={
                name: GroupMetadata(
                    block_table_SP=table[[r.sequence for r in rows]].to(self._device),
                    kv_index_T=torch.cat(
                        [
                            table[r.sequence].long()[at // self._page_size] * self._page_size + at % self._page_size
                            for r, at in zip(rows, positions, strict=True)
                        ]
                    ).to(self._device),
                )
                for name, table in self._block_tables.items()
            },
            most_keys=max((r.start + len(r.token_ids) for r in rows), default=0),
        )
