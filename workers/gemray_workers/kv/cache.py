"""Keys and values as a model's layers see them: views over pages that a pool owns.

Shape legend: T rows, N KV heads on this rank, D head dim; pages are [num_pages, page_size, N, D].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from gemray_kernels.reference.kv_write import write_kv
from gemray_workers.kv.scales import KVScales
from gemray_workers.kv.spec import KVGroupSpec


class KVReader:
    """The pages of one layer, to read. KV-shared layers and drafters that share KV hold nothing else."""

    def __init__(self, k_pages: Tensor, v_pages: Tensor, scales: KVScales) -> None:
        self.k_pages = k_pages
        self.v_pages = v_pages
        self.scales = scales


class KVWriter(KVReader):
    """The pages of the layer that owns them."""

    def write(self, k_TND: Tensor, v_TND: Tensor, kv_index_T: Tensor) -> None:
        """Store row t at index ``kv_index_T[t] = page * page_size + offset``."""
        write_kv(k_TND, v_TND, self.k_pages, self.v_pages, kv_index_T, k_scale=self.scales.k, v_scale=self.scales.v)


class KVCaches:
    """Every layer's cache, by layer index. A layer that owns no KV resolves to its donor's, read-only."""

    def __init__(
        self,
        specs: Iterable[KVGroupSpec],
        pages: Mapping[int, tuple[Tensor, Tensor]],
        donors: Mapping[int, int] | None = None,
        scales: Mapping[int, KVScales] | None = None,
    ) -> None:
        """Views over `pages`.

        Args:
            specs: the groups; each layer that owns KV is in one of them.
            pages: (k_pages, v_pages) of each layer that owns KV.
            donors: the owner whose KV each of the other layers reads.
            scales: of owners whose pages hold 8-bit floats; 1 for those that are left out.
        """
        parts = {layer: (*pair, (scales or {}).get(layer, KVScales())) for layer, pair in pages.items()}
        self._writers = {layer: KVWriter(*of_layer) for layer, of_layer in parts.items()}
        self._own_readers = {layer: KVReader(*of_layer) for layer, of_layer in parts.items()}
        self._readers = dict(self._own_readers)
        self._groups = {layer: spec.name for spec in specs for layer in spec.layers}
        for layer, donor in (donors or {}).items():
            self._readers[layer] = self._readers[donor]
            self._groups[layer] = self._groups[donor]

    def rebind(self, pages: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Let every view show other memory: (k_pages, v_pages) of each layer that owns KV. Who holds a view need not be
        told; a graph that was captured over the old memory is of no more use."""
        for layer, (k_pages, v_pages) in pages.items():
            for view in (self._writers[layer], self._own_readers[layer]):
                view.k_pages, view.v_pages = k_pages, v_pages

    def writer(self, layer: int) -> KVWriter:
        """The cache of a layer that owns KV; KeyError for any other."""
        return self._writers[layer]

    def reader(self, layer: int) -> KVReader:
        """The cache that `layer` reads: its own or its donor's."""
        return self._readers[layer]

    def group_of(self, layer: int) -> str:
        """Name of the KV group whose block table addresses the cache that `layer` reads."""
        return self._groups[layer]
