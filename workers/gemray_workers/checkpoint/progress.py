"""A progress bar for loading weights, on the one rank a user watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from gemray_workers.checkpoint.loader import ProgressFn


@contextmanager
def progress_bar(description: str, *, rank: int, stream: TextIO | None = None) -> Iterator[ProgressFn | None]:
    """Yield a callback for `load_weights` that draws a bar, or None where nobody would see it.

    Drawn on rank 0 only, and only when `stream` (standard error by default) is a terminal.
    """
    stream = sys.stderr if stream is None else stream
    if rank != 0 or not stream.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(description, total=None)

        def advance(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield advance
