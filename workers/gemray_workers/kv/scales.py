"""What the 8-bit floats of a layer's keys and values are multiplied with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVScales:
    """One number for all keys of a layer, and one for all its values (`gemray_kernels.fp8_kv`); 1 where pages hold the
    model's dtype.
    """

    k: float = 1.0
    v: float = 1.0
