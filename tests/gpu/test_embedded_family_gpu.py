"""The embedded family on a GPU beside the CPU: the same text or a shown near tie, and as many drafts accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from gemray_workers.config import DTypeName
from gemray_workers.embedded import EmbeddedName
from support.engine.embedded_devices import ACCEPTANCE, DRAFTERS, NEAR_TIE, compare, family_run, texts
from support.engine.engine_runner import Run
from support.engine.gpu import needs_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NUM_PROMPTS, NUM_TOKENS = 96, 64


@cache
def on_cpu(drafter: EmbeddedName | None) -> Run:
    """In float32, which float64 differs from in nothing that is measured here."""
    return family_run(drafter, "cpu", "float32", texts(NUM_PROMPTS, NUM_TOKENS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_texts_and_acceptance_are_those_of_the_cpu(
    drafter: EmbeddedName | None, dtype: DTypeName, record_property: Callable[[str, object], None]
) -> None:
    needs_gpus(1)
    on_gpu = family_run(drafter, "cuda", dtype, texts(NUM_PROMPTS, NUM_TOKENS))
    found = compare(f"{drafter or 'no drafter'}, {dtype} on a GPU beside float32 on CPU", on_cpu(drafter), on_gpu)
    record_property("embedded", found.line)
    print(found.line)
    assert all(abs(parting.gap) < NEAR_TIE[dtype] for parting in found.partings), found.line
    assert found.acceptance_differs_by < ACCEPTANCE, found.line
