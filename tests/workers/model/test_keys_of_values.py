"""Layers whose keys and values are one projection say how keys follow from values, which kernels may read instead."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference.keys_of_values import KeysOfValues
from gemray_kernels.reference.paged_attention import paged_attention
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.oracles.oracle import solo_model
from support.oracles.paged import PagedCache, Rows

PROMPT = [5, 9, 33, 70, 2, 8, 44, 60, 17, 21, 90, 3, 51]


@pytest.mark.parametrize("shape", ["31B", "26B-A4B", "12B", "E2B"])
def test_dims_that_stand_still_are_those_of_values_times_a_weight(shape: Shape) -> None:
    model = solo_model(tiny_checkpoint(shape), torch.float64)
    given: list[tuple[Tensor, Tensor, KeysOfValues | None]] = []

    def attend(
        q_TND: Tensor, k_pages: Tensor, v_pages: Tensor, *tables: Any, keys_of_values: KeysOfValues | None, **rest: Any
    ) -> Tensor:
        given.append((k_pages, v_pages, keys_of_values))
        return paged_attention(q_TND, k_pages, v_pages, *tables, **rest)

    cache = PagedCache(model.config, num_sequences=1, max_len=len(PROMPT), dtype=torch.float64)
    with ExitStack() as patches:
        for layer in model._layers:
            patches.enter_context(mock.patch.object(layer._attention, "_kernel", attend))
        model.forward(cache.batch([Rows(0, PROMPT, 0)]), cache.caches)
    assert len(given) == len(model.config.layers)
    for config, (k_pages, v_pages, keys) in zip(model.config.layers, given, strict=True):
        assert (keys is not None) == (config.k_eq_v and config.kv_donor is None)
        if keys is None:
            continue
        half = config.head_dim // 2
        assert 0 < keys.num_rotating < half
        still_D = torch.arange(config.head_dim) % half >= keys.num_rotating
        difference_LKD = (k_pages - v_pages * keys.weight_D)[~k_pages.isnan().any(3).any(2)]
        assert len(difference_LKD) == len(PROMPT)
        assert difference_LKD[..., still_D].abs().max() < 1e-14
        assert (difference_LKD[..., ~still_D].abs().flatten(0, 1).max(0).values > 1e-3).all(), "they rotate"
    assert any(keys is not None for *_, keys in given) == (shape != "E2B")
