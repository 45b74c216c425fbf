"""A progress bar for what takes long at start, on the one rank a user watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from gemray_workers.checkpoint.loader import ProgressFn


@contextmanager
def progress_bar(
    description: str, *, rank: int, unit: str | None = None, stream: TextIO | None = None
) -> Iterator[ProgressFn | None]:
    """Yield a callback, called with (done, total), that draws a bar, or None where no terminal would show it.

    The numbers are bytes, or counts of `unit`.

    Drawn on rank 0 only, and only when `stream` (standard error by default) is a terminal.
    """
    stream = sys.stderr if stream is None else stream
    if rank != 0 or not stream.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts: list[ProgressColumn] = [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    if unit is not None:
        counts = [MofNCompleteColumn(), TextColumn(unit)]
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(description, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance
