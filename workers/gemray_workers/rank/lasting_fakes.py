"""Fake tensors of a rank's real ones, made once for all cycles of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@contextmanager
def lasting_fakes() -> Iterator[None]:
    """Torch's fake tensors meanwhile; real ones may be read, and each keeps the fake that stands for it.

    Torch remembers that fake only while something else holds it. That is one call, so each cycle would make those of
    all weights anew; a packed weight is a view of memory, whose fake takes most.
    """
    kept: list[FakeTensor] = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        converter = mode.fake_tensor_converter
        make = converter.from_real_tensor

        def make_to_last(*args: Any, **options: Any) -> FakeTensor:
            kept.append(make(*args, **options))
            return kept[-1]

        converter.from_real_tensor = make_to_last  # type: ignore[method-assign]
        try:
            yield
        finally:
            # A view holds its base, which holds the mode: the collector can't take apart what goes through the list.
            kept.clear()
