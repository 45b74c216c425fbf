"""Outputs of graphs: seen where they lie, and not kept from being written over."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gemray_workers.engine.cycle import CycleOutput
from gemray_workers.engine.graphs import given_up
from gemray_workers.engine.unowned import unowned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_it_shows_the_same_memory(dtype: torch.dtype) -> None:
    owner = torch.arange(24).view(2, 3, 4).to(dtype)
    shown = unowned(owner)
    assert shown.dtype == dtype
    assert shown.data_ptr() == owner.data_ptr()
    assert torch.equal(shown, owner)
    owner[1, 2, 3] = 99
    assert shown[1, 2, 3] == 99
    part = owner[1]
    assert torch.equal(unowned(part), part)
    assert unowned(part).data_ptr() == part.data_ptr()


def test_it_keeps_nothing() -> None:
    owner = torch.zeros(1024)
    memory = StorageWeakRef(owner.untyped_storage())
    shown = unowned(owner)
    del owner
    assert memory.expired()
    assert shown.shape == (1024,)


def test_what_has_no_place_of_its_own_comes_back() -> None:
    empty, strided = torch.empty(0, 7), torch.zeros(4, 6)[:, ::2]
    assert unowned(empty) is empty
    assert unowned(strided) is strided


def test_a_captured_output_keeps_its_small_tensors_alone() -> None:
    """Logits are a MiB a row; what the host copies is a few numbers a sequence."""
    logits_RV, hidden_UH = torch.randn(3, 512), torch.randn(3, 16)
    output = CycleOutput(torch.zeros(2, 4), logits_RV, hidden_UH, torch.zeros(3), is_narrowed=True)
    large = [StorageWeakRef(tensor.untyped_storage()) for tensor in (logits_RV, hidden_UH)]
    given = given_up(output)
    assert given.logits_RV is not None
    assert torch.equal(given.logits_RV, logits_RV)
    assert torch.equal(given.hidden_UH, hidden_UH)
    assert given.found_CK is output.found_CK
    assert given.first_A is output.first_A
    assert given.is_narrowed
    del output, logits_RV, hidden_UH
    assert all(memory.expired() for memory in large)
    assert given_up(CycleOutput(None, None, torch.zeros(0, 16), torch.zeros(1), is_narrowed=False)).logits_RV is None
