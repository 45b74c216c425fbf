"""The model over a cache of 8-bit floats: what a row reads does not depend on the pass that wrote it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemray_kernels.fp8_kv import FP8, to_fp8
from gemray_workers.kv.scales import KVScales
from gemray_workers.model.target import TargetModel
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.oracles.oracle import solo_model, whole_logits
from support.oracles.paged import PagedCache, Rows

PROMPT = [5, 9, 33, 70, 2, 8, 44, 60, 17, 21, 90, 3, 51, 12, 7, 66, 40, 28, 11, 95]
SHAPES: tuple[Shape, ...] = ("31B", "E2B", "26B-A4B")


def scales_of(model: TargetModel) -> dict[int, KVScales]:
    return {layer: KVScales(0.01 + layer / 1000, 0.007) for kind in model.config.kv_owners.values() for layer in kind}


def logits(model: TargetModel, chunks: list[int], dtype: torch.dtype) -> tuple[Tensor, PagedCache]:
    """Logits of every row of the prompt, computed in chunks, and the cache."""
    scales = scales_of(model) if dtype == FP8 else None
    cache = PagedCache(model.config, num_sequences=1, max_len=len(PROMPT), dtype=dtype, scales=scales)
    found, start = [], 0
    for length in chunks:
        rows = Rows(0, PROMPT[start : start + length], start)
        found.append(model.logits(model.forward(cache.batch([rows]), cache.caches).hidden_UH))
        start += length
    assert start == len(PROMPT)
    return whole_logits(model, torch.cat(found)), cache


@pytest.mark.parametrize("shape", SHAPES)
def test_chunk_borders_change_no_value(shape: Shape) -> None:
    """A chunk reads its own rows as rounded as later ones will."""
    model = solo_model(tiny_checkpoint(shape), torch.float64)
    whole, cache = logits(model, [len(PROMPT)], FP8)
    assert cache.caches.reader(0).k_pages.dtype == FP8
    for chunks in ([1] * len(PROMPT), [7, 1, 12], [3, 5, 11, 1]):
        parts, other = logits(model, chunks, FP8)
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-11)
        for layer in scales_of(model):
            for name in ("k_pages", "v_pages"):
                bytes_of = [getattr(c.caches.reader(layer), name).view(torch.uint8) for c in (cache, other)]
                assert torch.equal(*bytes_of), "every number is kept the same"
    unrounded, _ = logits(model, [len(PROMPT)], torch.float64)
    assert (unrounded - whole).abs().max() > 1e-4, "the cache is not rounded"


def test_keys_and_values_are_those_of_the_plain_cache_rounded_over_the_layers_scales() -> None:
    """In the first layer, whose input no rounding has touched."""
    model = solo_model(tiny_checkpoint("31B"), torch.float64)
    scales = scales_of(model)[0]
    _, rounded = logits(model, [len(PROMPT)], FP8)
    _, plain = logits(model, [len(PROMPT)], torch.float64)
    for name, scale in (("k_pages", scales.k), ("v_pages", scales.v)):
        kept, meant = (getattr(cache.caches.reader(0), name) for cache in (rounded, plain))
        expected = to_fp8(meant, scale)
        is_written = ~meant.isnan()
        assert is_written.any()
        assert torch.equal(kept.double()[is_written], expected.double()[is_written])


def test_layers_that_share_kv_read_their_donors_scales() -> None:
    model = solo_model(tiny_checkpoint("E2B"), torch.float64)
    _, cache = logits(model, [len(PROMPT)], FP8)
    donors = {layer.index: layer.kv_donor for layer in model.config.layers if layer.kv_donor is not None}
    assert donors
    for layer, donor in donors.items():
        assert cache.caches.reader(layer).scales == scales_of(model)[donor]
