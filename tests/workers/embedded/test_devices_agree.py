"""What holds the family on a GPU against the CPU, tried with two dtypes of the CPU."""

from __future__ import annotations

import pytest

from gemray_workers.config import DTypeName
from gemray_workers.embedded import EmbeddedName
from support.engine.embedded_devices import NEAR_TIE, Comparison, compare, family_run, texts

DRAFTER: EmbeddedName = "gemray-tiny-assistant"


@pytest.fixture(scope="module")
def comparisons() -> dict[DTypeName, Comparison]:
    """Float32 beside each dtype."""
    submits = texts(8, 24)
    first = family_run(DRAFTER, "cpu", "float32", submits)
    dtypes: tuple[DTypeName, ...] = ("float32", "bfloat16")
    return {dtype: compare(dtype, first, family_run(DRAFTER, "cpu", dtype, submits)) for dtype in dtypes}


def test_the_same_run_agrees_with_itself(comparisons: dict[DTypeName, Comparison]) -> None:
    same = comparisons["float32"]
    assert same.partings == []
    assert same.acceptance_differs_by == 0.0
    assert same.lengths[0] > 1.8, "a trained drafter"
    assert "192 of 192 tokens before the first difference" in same.line


def test_bfloat16_parts_at_near_ties_that_are_shown(comparisons: dict[DTypeName, Comparison]) -> None:
    other = comparisons["bfloat16"]
    assert all(abs(parting.gap) < NEAR_TIE["bfloat16"] for parting in other.partings), other.line
    assert all(f"{parting.request_id}@{parting.position}" in other.line for parting in other.partings)
    assert other.lengths[0] != other.lengths[1] or not other.partings
