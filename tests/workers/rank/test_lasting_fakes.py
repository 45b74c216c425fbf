"""A rehearsal makes the fake of each real tensor once, however many cycles read it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.meta_utils import MetaConverter

from gemray_workers.rank.lasting_fakes import lasting_fakes


def conversions(monkeypatch: pytest.MonkeyPatch, mode: Callable[[], AbstractContextManager[object]]) -> int:
    """How often a packed weight, a view of memory, is made a fake one in three cycles that read it."""
    made: list[Any] = []
    make = MetaConverter.__call__

    def noted(*args: Any, **options: Any) -> Any:
        made.append(args)
        return make(*args, **options)

    weight_OW = torch.zeros(1 << 10, dtype=torch.uint8)[:768].view(torch.int16).view(16, 24)
    with monkeypatch.context() as patched, mode():
        patched.setattr(MetaConverter, "__call__", noted)
        for _ in range(3):
            assert isinstance(weight_OW[:8] + 1, FakeTensor)
    return len(made)


def test_a_weight_is_made_a_fake_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert conversions(monkeypatch, lambda: FakeTensorMode(allow_non_fake_inputs=True)) == 3
    assert conversions(monkeypatch, lasting_fakes) == 1


def test_no_fake_outlives_the_mode() -> None:
    weight_OW = torch.zeros(1 << 10, dtype=torch.uint8)[:768].view(torch.int16).view(16, 24)
    with lasting_fakes():
        assert isinstance(weight_OW + 1, FakeTensor)
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, FakeTensor)]
