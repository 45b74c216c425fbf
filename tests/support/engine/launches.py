"""What one step would launch on a card, counted on a CPU: each kernel of the tables once, and every other operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from gemray_kernels.reference.token_choice import ReferenceKernels
from gemray_kernels.table import REFERENCE, REFERENCE_ROWS
from gemray_workers.execution import slots
from gemray_workers.model import weight_sharding
from gemray_workers.sampling import state

FREE = frozenset({"aten.promote_types.default", "aten.detach_.default", "aten.empty.memory_format"})
"""Operations that compute nothing."""


class Launches(TorchDispatchMode):
    """Counts operations, but a kernel's reference as the one launch that it stands for.

    Models and slot tables that are built after `install` call the counted kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self._inside = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counted: dict[str, Any] = {
            f.name: self._counted(f.name, getattr(REFERENCE, f.name))
            for f in fields(REFERENCE)
            if callable(getattr(REFERENCE, f.name))
        }
        kernels = replace(REFERENCE, **counted)
        rows = replace(
            REFERENCE_ROWS,
            **{f.name: self._counted(f.name, getattr(REFERENCE_ROWS, f.name)) for f in fields(REFERENCE_ROWS)},
        )
        choice: Any = ReferenceKernels()
        for name in ("edited_logits", "offer", "decide"):
            setattr(choice, name, self._counted(name, getattr(choice, name)))
        monkeypatch.setattr(weight_sharding, "kernels_for", lambda *_: kernels)
        monkeypatch.setattr(slots, "row_kernels_for", lambda _: rows)
        monkeypatch.setattr(state, "choice_kernels", lambda *_: choice)

    def called(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Another function that stands for one launch."""
        return self._counted(name, function)

    def clear(self) -> None:
        self.count.clear()

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count[name] += not self._inside
            self._inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside and not func.is_view and str(func) not in FREE:
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))
