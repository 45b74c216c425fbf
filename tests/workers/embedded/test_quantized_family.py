"""The trained family in 4 bits: a loss near the plain one, drafts still accepted, ids the plain ones of its own."""

from __future__ import annotations

import pytest
import torch

from gemray_kernels.fp8_kv import FP8
from gemray_workers.embedded import embedded_path
from support.checkpoints.quantized import FormatName
from support.engine.held_out_requests import held_out_prompts
from support.oracles.oracle import solo_model
from support.quantized_family.measure import Measured, held_out_nats, measure


def family(name: FormatName | None) -> Measured:
    return measure(name, num_prompts=10, num_requests=4)


@pytest.fixture(scope="module")
def plain() -> Measured:
    return family(None)


@pytest.mark.parametrize("name", ["int4-g128", "nvfp4"])
def test_a_quantized_family_is_near_the_plain_one(plain: Measured, name: FormatName) -> None:
    """4 bits cost about 0.1 nats (benchmarks/results/2026-11-29-quantized-family); a wrong scale costs several."""
    found = family(name)
    assert 0.001 < found.nats - plain.nats < 0.25
    assert found.weight_bytes < 0.6 * plain.weight_bytes
    assert found.ids_differ == 0
    assert all(rate > 1.8 for rate in found.tokens_per_round.values()), "an untrained drafter gets next to nothing"


def test_an_8_bit_kv_cache_costs_next_to_nothing(plain: Measured) -> None:
    """0.003 nats over all held-out prompts (benchmarks/results/2026-11-29-fp8-kv)."""
    prompts = [prompt["ids"] for prompt in held_out_prompts(10)]
    nats = held_out_nats(solo_model(embedded_path("gemray-tiny"), torch.float32), prompts, FP8)
    assert 0 < abs(nats - plain.nats) < 0.03
