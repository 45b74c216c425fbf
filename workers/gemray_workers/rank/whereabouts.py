"""What a rank does at a moment, for whoever wants to know why it is silent."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import msgspec
import torch._C._distributed_c10d as c10d

from gemray_workers.parallel.exchanges import Exchanges

_PACKAGE = "gemray_workers."
_COLLECTIVES = f"{_PACKAGE}parallel."
_MOST_FRAMES = 40
"""Innermost ones of a thread that are told."""
_RECORDER_S = 1.0
"""The recorder asks the driver, which may be what hangs."""


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's process does."""

    exchanges: list[Exchanges]
    """By group; none for a rank alone."""
    at: str
    """The innermost function of ours that is not a collective itself: it tells which of a step's exchanges this is."""
    device: str
    """What torch's flight recorder says of collectives that a card has not ended; empty for none."""
    stacks: str
    """Python's stack of each thread, innermost last."""


def whereabouts(exchanges: Sequence[Exchanges]) -> Whereabouts:
    """Those of this process, but for the thread that asks."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {names.get(ident, f"thread {ident}"): _stack(frame) for ident, frame in frames.items()}
    ours = [found for stack in stacks.values() if (found := _innermost(stack))]
    return Whereabouts(
        exchanges=list(exchanges),
        at=max(ours, key=len)[-1] if ours else "",
        device=_unfinished_on_device(),
        stacks="\n".join(f"{name}:\n" + "\n".join(f"  {line}" for line in stack) for name, stack in stacks.items()),
    )


def _stack(frame: FrameType | None) -> list[str]:
    """A thread's functions, each as module, name and line."""
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        lines.append(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return lines[::-1]


def _innermost(stack: Sequence[str]) -> list[str]:
    """Our own functions of a stack without what exchanges."""
    return [line for line in stack if line.startswith(_PACKAGE) and not line.startswith(_COLLECTIVES)]


def _unfinished_on_device() -> str:
    dump: Callable[..., bytes | str] | None = getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:  # torch built for CPU
        return ""
    told = ["torch's flight recorder gives no answer"]

    def read() -> None:
        try:
            told.append(unfinished(json.loads(dump(includeCollectives=True))))
        except Exception as error:  # what it was to explain is told without it
            told.append(f"torch's flight recorder cannot be read: {error}")

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(_RECORDER_S)
    return told[-1]


def unfinished(recorded: dict[str, Any]) -> str:
    """The first collective of each group that has not ended, and how many follow it, from a record of torch's."""
    told = []
    groups: dict[Any, list[dict[str, Any]]] = {}
    for entry in unfinished_entries(recorded):
        groups.setdefault(entry.get("pg_id"), []).append(entry)
    for entries in groups.values():
        first = entries[0]
        which = f"{first['profiling_name']} number {first['collective_seq_id']} of {first['input_sizes']}"
        told.append(f"{which} is {first['state']}, {len(entries) - 1} more behind it")
    return "; ".join(told)


def unfinished_entries(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """Collectives of a record of torch's that a card has not ended, first those that began first."""
    entries = recorded.get("entries", [])
    return [entry for entry in entries if entry.get("state") != "completed" and not entry.get("retired")]
