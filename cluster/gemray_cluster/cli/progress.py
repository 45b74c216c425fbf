"""Progress of a gang's start: a line that moves on a terminal, a line a stage elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gemray.cli.account import tell
from gemray_cluster.gang.launcher import ProgressListener, StartProgress

_STAGES = {
    "ray": "connected to Ray",
    "placement": "placing the ranks",
    "processes": "starting processes",
    "load": "loading weights",
    "ready": "ready",
}


@contextmanager
def start_progress() -> Iterator[ProgressListener]:
    """A listener that shows what it hears on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with stage_lines(tell) as show_stage:
            yield show_stage
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting")

        def show(progress: StartProgress) -> None:
            text = " ".join(part for part in (_STAGES.get(progress.stage, progress.stage), progress.detail) if part)
            bar.update(task, description=text, completed=progress.done, total=progress.total)

        yield show


@contextmanager
def stage_lines(tell: Callable[[str], None]) -> Iterator[ProgressListener]:
    """A listener that tells each stage, and what is said of it, once."""
    said: set[tuple[str, str]] = set()

    def show(progress: StartProgress) -> None:
        key = (progress.stage, progress.detail)
        if key not in said:
            said.add(key)
            tell(f"{_STAGES.get(progress.stage, progress.stage)} {progress.detail}".rstrip())

    yield show
