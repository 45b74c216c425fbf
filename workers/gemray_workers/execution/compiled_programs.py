"""How many Triton programs this process has compiled: none may be added once a server is ready.

A program that is compiled while requests run holds all of them up for a second or two, and makes the time of that step
useless as a measurement. The target's ranks run the same plans in the same shapes, so one rank's count stands for them
all; a drafter's own rank has programs of its own, which a server does not report.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

MOST_NAMED = 64
"""Programs of which is known which they were."""


class CompiledPrograms:
    """A count that only grows; `observe` is told of each program that is compiled, `begin` before that."""

    def __init__(self) -> None:
        self._count = 0
        self._names: deque[str] = deque(maxlen=MOST_NAMED)
        self._seconds = 0.0
        self._began: float | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def count(self) -> int:
        """Programs compiled, or read from Triton's cache on disk, since the process began to count."""
        return self._count

    def latest(self, count: int) -> list[str]:
        """The kernel of each of the latest programs and what it was specialized for, the oldest first; at most
        `MOST_NAMED` of them."""
        return list(self._names)[-count:] if count else []

    @property
    def seconds(self) -> float:
        """How long this thread has been held up for them."""
        return self._seconds

    def observe(self, name: str = "a program") -> None:
        """Count one more program, and the time since `begin`."""
        self._count += 1
        self._names.append(name)
        if self._began is not None:
            self._seconds += time.perf_counter() - self._began
            self._began = None

    def compiled_ahead(self, count: int, seconds: float) -> None:
        """Count programs that were compiled side by side, of which the hooks know nothing, and how long that took."""
        self._count += count
        self._seconds += seconds

    def begin(self) -> None:
        """Tell those who listen that a program is about to be compiled."""
        self._began = time.perf_counter()
        for listener in self._listeners:
            listener()

    @contextmanager
    def heard_by(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` before each program that is compiled meanwhile, on the thread that compiles it."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


@functools.cache
def compiled_programs() -> CompiledPrograms:
    """The process's count, which begins at the first call. It stays 0 where there is no Triton, and in its interpreter,
    which compiles nothing.
    """
    programs = CompiledPrograms()
    try:
        from triton import knobs
        from triton.runtime import jit
    except ImportError:
        return programs
    jit.serialize_specialization_data = _with_objects(jit.serialize_specialization_data)
    knobs.runtime.jit_cache_hook = _first(programs, knobs.runtime.jit_cache_hook)
    knobs.runtime.jit_post_compile_hook = _then(programs, knobs.runtime.jit_post_compile_hook)
    return programs


def _with_objects(serialize: Callable[..., str]) -> Callable[..., str]:
    """Triton's description of a program for its hooks, in JSON, also where the compiler knows objects: without this a
    launch fails for a Gluon kernel whose layouts or shape are such, as soon as there is a hook (Triton 3.6 and 3.9).
    """

    @functools.wraps(serialize)
    def described(name: str, signature: Any, constants: dict[Any, Any], *rest: Any) -> str:
        plain = {key: repr(value) if is_dataclass(value) else value for key, value in constants.items()}
        return serialize(name, signature, plain, *rest)

    return described


def _first(programs: CompiledPrograms, earlier: Callable[..., Any] | None) -> Callable[..., Any]:
    """Called before a program is compiled; an answer that is true would keep Triton from it."""

    def compiles(**program: Any) -> Any:
        programs.begin()
        return None if earlier is None else earlier(**program)

    return compiles


def _then(programs: CompiledPrograms, earlier: Callable[..., Any] | None) -> Callable[..., Any]:
    """Triton has room for one such hook; one that was set before is still called."""

    def compiled(**program: Any) -> Any:
        if not program.get("already_compiled"):
            programs.observe(f"{getattr(program.get('fn'), 'name', 'a kernel')} {program.get('key')}")
        return None if earlier is None else earlier(**program)

    return compiled
