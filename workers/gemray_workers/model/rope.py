"""The rotary embeddings of a model: one set of frequencies for each layer type (spec 1.5).

Shape legend: T rows, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gemray_kernels.reference.rope import inverse_frequencies
from gemray_kernels.table import Kernels
from gemray_workers.model.config import LayerConfig, LayerKind

CosSin = tuple[Tensor, Tensor]
"""Cosines and sines of every row's angles, [T, 1, D] each."""


class RotaryEmbeddings:
    """Angles of positions, computed once a forward pass for each layer type."""

    def __init__(self, layers: Iterable[LayerConfig], kernels: Kernels, device: torch.device) -> None:
        self._rope_tables = kernels.rope_tables
        self._frequencies = {
            layer.kind: inverse_frequencies(
                layer.head_dim,
                layer.rope.theta,
                partial_rotary_factor=layer.rope.partial_rotary_factor,
                factor=layer.rope.factor,
                device=device,
            )
            for layer in {layer.kind: layer for layer in layers}.values()
        }

    def cos_sin(self, positions_T: Tensor, dtype: torch.dtype) -> Mapping[LayerKind, CosSin]:
        """Cosines and sines for layers of each type."""
        tables = self._rope_tables(positions_T, tuple(self._frequencies.values()), dtype)
        return dict(zip(self._frequencies, tables, strict=True))
