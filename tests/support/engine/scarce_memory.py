"""Settings with so little KV memory that sequences push each other out."""

from __future__ import annotations

from dataclasses import replace

from gemray_workers.config import EngineConfig
from gemray_workers.errors import CapacityError
from gemray_workers.rank.blueprint import Blueprint


def least_memory(config: EngineConfig) -> int:
    """Bytes of KV in which one sequence of `max_model_len` tokens just fits."""
    assert config.kv_memory_bytes is not None
    low, high = 0, config.kv_memory_bytes
    while high - low > 1024:
        middle = (low + high) // 2
        try:
            fits = Blueprint.of(replace(config, kv_memory_bytes=middle)).pools.max_model_len == config.max_model_len
        except CapacityError:
            fits = False
        low, high = (low, middle) if fits else (middle, high)
    return high
