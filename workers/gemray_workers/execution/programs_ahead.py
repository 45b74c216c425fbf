"""Triton programs that a rehearsal would launch, compiled side by side before any of them is launched.

Triton compiles a program when it is first launched, on the thread that launches it, so a start that finds nothing in
the cache on disk would wait for one program after the other while all other cores rest. Here launches are noted first
(`noted_programs`), with nothing run and nothing compiled, and then compiled on as many threads as there are cores for
it (`compile_side_by_side`): most of a compilation is LLVM's and the assembler's, during which Python's lock is
free. The ordinary first launch then finds its program.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gemray_workers.execution.compiled_programs import compiled_programs


@dataclass(frozen=True)
class Program:
    """One specialization of a kernel."""

    kernel: Any
    """Triton's JITFunction."""
    arguments: tuple[Any, ...]
    """What its method that compiles is called with: key, signature, device, constants, options, attributes, whether
    it is compiled for its own sake."""

    @property
    def name(self) -> str:
        """The kernel's."""
        return str(self.kernel.__name__)


@dataclass(frozen=True)
class CompiledAhead:
    """What became of the programs."""

    num_compiled: int
    num_found: int
    """Found in Triton's cache on disk."""
    failures: tuple[str, ...]
    """What was not compiled, and why: the first launch will try again, and raise."""
    seconds: float


def launches_compile() -> bool:
    """Whether kernels are compiled when they are launched: Triton's interpreter runs them as they are."""
    from triton import knobs

    return not knobs.runtime.interpret


@contextmanager
def noted_programs() -> Iterator[list[Program]]:
    """Launch and compile nothing meanwhile, on any thread: only note, once each and in the order of their first
    launches, programs that this process has not compiled. Outputs of kernels stay as they were allocated.
    """
    from triton.runtime.jit import JITFunction

    programs: list[Program] = []
    seen: set[tuple[int, Any]] = set()
    run, compile_one = JITFunction.run, JITFunction._do_compile

    def note_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    def note_program(kernel: Any, key: Any, *arguments: Any) -> None:
        if (id(kernel), key) not in seen:
            seen.add((id(kernel), key))
            programs.append(Program(kernel, (key, *arguments)))

    JITFunction.run, JITFunction._do_compile = note_launch, note_program
    try:
        yield programs
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_one


def compile_side_by_side(
    programs: Sequence[Program], workers: int, *, part: int = 0, parts: int = 1, bind: Callable[[], None] | None = None
) -> CompiledAhead:
    """Compile programs, so that their first launches find them in this process, and other processes on disk.

    Args:
        programs: noted on this process's device.
        workers: threads.
        part: which of `parts` to begin with. Processes that share a cache and need the same programs each begin with
            another part, and find the rest on disk by the time they come to it.
        parts: how many of them there are.
        bind: called first on each thread.
    """
    from triton import knobs
    from triton.runtime import driver

    started = time.perf_counter()
    lock = threading.Lock()
    found = {True: 0, False: 0}
    failures: list[str] = []
    earlier = knobs.compilation.listener
    hooks = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook

    def listener(**compiled: Any) -> None:
        with lock:
            found[bool(compiled["cache_hit"])] += 1
        if earlier is not None:
            earlier(**compiled)

    def compile_one(program: Program) -> None:
        try:
            compiled = program.kernel._do_compile(*program.arguments)
            if compiled is not None:
                # Up to Triton 3.6 what launches a program is C that is compiled for its signature, and cached as well.
                driver.active.launcher_cls(compiled.src, compiled.metadata)
        except Exception as error:
            with lock:
                failures.append(f"{program.name}: {type(error).__name__}: {error}")

    ordered = [program for i in range(parts) for program in programs[(part + i) % parts :: parts]]
    knobs.compilation.listener = listener
    # Told of one program at a time, on the thread that waits for it: see `CompiledPrograms`.
    knobs.runtime.jit_cache_hook = knobs.runtime.jit_post_compile_hook = None
    try:
        with ThreadPoolExecutor(workers, "compile", initializer=bind) as pool:
            # The first one by itself: for the first key of its cache Triton hashes its own files, hundreds of
            # megabytes, and every thread that comes meanwhile would hash them, too.
            list(pool.map(compile_one, ordered[:1]))
            list(pool.map(compile_one, ordered[1:]))
    finally:
        knobs.compilation.listener = earlier
        knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = hooks
    seconds = time.perf_counter() - started
    compiled_programs().compiled_ahead(len(programs) - len(failures), seconds)
    return CompiledAhead(found[False], found[True], tuple(failures), seconds)
