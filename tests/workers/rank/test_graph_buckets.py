"""Which graphs the published shapes are served with: as many as a start has time for, prompts among them."""

from __future__ import annotations

from typing import Any

import pytest

from gemray_workers.config import EngineConfig
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.graph_buckets import graph_buckets
from support.engine.gpu import CONFIGS


def config(shape: str, chunk: int | None, **changes: Any) -> EngineConfig:
    """A server's default batch with an MTP assistant, whose buckets are the most."""
    return EngineConfig(
        model_path=str(CONFIGS / f"{shape}-it"),
        drafter_path=str(CONFIGS / f"{shape}-it-assistant"),
        dtype="bfloat16",
        random_weights=True,
        kv_memory_bytes=4 << 30,
        max_model_len=16384,
        prefill_chunk=chunk,
        **{"tensor_parallel_size": 1, "device": "cuda", **changes},
    )


@pytest.mark.parametrize(
    ("shape", "chunk", "most_rows", "count"),
    [("31B", 256, 512, 75), ("E4B", 1024, 1024, 94), ("31B", 4096, 640, 84), ("E4B", 4096, 4096, 118)],
)
def test_graphs_of_a_server(shape: str, chunk: int, most_rows: int, count: int) -> None:
    keys = graph_buckets(Blueprint.of(config(shape, chunk)))
    assert len(keys) == len(set(keys)) == count
    assert max(key[0].num_rows for key in keys if key[0].num_sequences == 1) == min(chunk, most_rows)
    assert max(key[0].most_rows for key in keys) >= most_rows


@pytest.mark.parametrize(
    ("shape", "changes", "chunk"),
    [
        ("31B", {}, 256),
        ("31B", {"tensor_parallel_size": 2}, 640),
        ("12B", {}, 896),
        ("26B-A4B", {}, 1024),
        ("E4B", {}, 1024),
        ("E4B", {"device": "cpu"}, 256),
    ],
)
def test_chunks_take_a_card_about_as_long(shape: str, changes: dict[str, Any], chunk: int) -> None:
    blueprint = Blueprint.of(config(shape, None, **changes))
    assert blueprint.scheduler.prefill_chunk == blueprint.config.prefill_chunk == chunk
    assert blueprint.scheduler.max_step_tokens == max(512, 32 * 5 + chunk)
    asked = Blueprint.of(config(shape, 128, **changes))
    assert asked.scheduler.prefill_chunk == 128
