"""The memory of the KV groups: for each layer that owns KV, pages of keys and pages of values.

Shape legend: B pages (the null page 0 included), P tokens a page, N KV heads on this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gemray_workers.errors import InvalidField
from gemray_workers.kv.cache import KVCaches
from gemray_workers.kv.scales import KVScales
from gemray_workers.kv.spec import KVGroupSpec


class KVPools:
    """All pages of one rank, and each layer's view of them.

    Memory is zeroed, so that a masked read of an entry that was never written is a number.
    """

    def __init__(
        self,
        donors: Mapping[int, int | None],
        specs: Iterable[KVGroupSpec],
        num_pages: Mapping[str, int],
        *,
        device: torch.device,
        scales: Mapping[int, KVScales] | None = None,
    ) -> None:
        """Allocate `num_pages` pages a group, and the null page.

        Args:
            donors: every layer of the model, with the layer whose KV it reads; None for one that owns KV in `specs`.
            specs: the groups.
            num_pages: by group; may name groups of other pools too.
            device: where the pages lie.
            scales: as of `KVCaches`.

        Raises:
            InvalidField: some layer of the model neither owns KV in a group nor reads the KV of one that does.
        """
        self._specs = {spec.name: spec for spec in specs}
        self._device = device
        self._pages_BPND = self._allocate(num_pages)
        self._check_every_layer(donors)
        readers = {layer: donor for layer, donor in donors.items() if donor is not None}
        self._caches = KVCaches(self._specs.values(), self._pages_BPND, readers, scales)

    @property
    def caches(self) -> KVCaches:
        """What the model's layers read and write."""
        return self._caches

    def release(self) -> None:
        """Give the memory back. The caches keep to nothing, until `allocate`."""
        nothing = torch.empty(0, device=self._device)
        self._caches.rebind(dict.fromkeys(self._pages_BPND, (nothing, nothing)))
        self._pages_BPND = {}

    def allocate(self, num_pages: Mapping[str, int]) -> None:
        """Other pools in place of those that were released; the caches show them."""
        self._pages_BPND = self._allocate(num_pages)
        self._caches.rebind(self._pages_BPND)

    @property
    def num_tensors(self) -> int:
        """Allocations of the pools."""
        return 2 * sum(len(spec.layers) for spec in self._specs.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, null pages included."""
        return sum(tensor.nbytes for pair in self._pages_BPND.values() for tensor in pair)

    def poison(self, pages: Mapping[str, Iterable[int]]) -> None:
        """Fill pages, by group, with NaN (debugging): whoever still reads them gets NaN, and whoever owns them next
        must write before reading. Groups of other pools are passed over."""
        for name, numbers in pages.items():
            if name not in self._specs:
                continue
            index = torch.tensor(list(numbers), dtype=torch.int64)
            for layer in self._specs[name].layers:
                for tensor_BPND in self._pages_BPND[layer]:
                    tensor_BPND[index.to(tensor_BPND.device)] = float("nan")

    def _allocate(self, num_pages: Mapping[str, int]) -> dict[int, tuple[Tensor, Tensor]]:
        return {
            layer: (_zeros(spec, num_pages[name], self._device), _zeros(spec, num_pages[name], self._device))
            for name, spec in self._specs.items()
            for layer in spec.layers
        }

    def _check_every_layer(self, donors: Mapping[int, int | None]) -> None:
        for layer, donor in donors.items():
            if (layer if donor is None else donor) not in self._pages_BPND:
                raise InvalidField(
                    f"layers[{layer}].kv_donor",
                    donor,
                    f"None in a KV group, or one of the layers that own KV: {sorted(self._pages_BPND)}",
                )


def _zeros(spec: KVGroupSpec, num_pages: int, device: torch.device) -> Tensor:
    shape = (num_pages + 1, spec.page_size, spec.num_kv_heads, spec.head_dim)
    return torch.zeros(shape, dtype=spec.dtype, device=device)
