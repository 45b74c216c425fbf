"""Triton's interpreter without what it does again and again."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_language_once() -> None:
    """Let a launch put interpreted functions in the place of the language's once, not in each call of a function.

    Triton looks through all members of its language for that whenever a kernel calls a function: a third of the time
    that our kernels take.
    """
    interpreter._patch_lang = _Patches(interpreter._patch_lang)


class _Patches:
    """Stands in for Triton's `_patch_lang`."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._languages: dict[FunctionType, tuple[bool, bool]] = {}
        self._patched: set[tuple[bool, bool]] = set()

    def __call__(self, function: FunctionType) -> Any:
        """Patch the language that a function sees, if no one has in this launch; what restores it."""
        if function not in self._languages:
            seen = function.__globals__.values()
            self._languages[function] = any(value is tl for value in seen), any(value is tl.core for value in seen)
        languages = self._languages[function]
        if languages in self._patched:
            return _Scope(lambda: None)
        self._patched.add(languages)
        scope = self._patch(function)
        if scope is None:  # versions that leave the language patched
            return None
        return _Scope(lambda: self._restore(scope))

    def _restore(self, scope: Any) -> None:
        self._patched.clear()
        scope.restore()


class _Scope:
    """What Triton asks to restore the language at the end of a launch."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self.restore = restore
