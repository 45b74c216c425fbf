"""The progress of several starts as one: as far as the one that is furthest behind."""

from __future__ import annotations

from functools import partial

from gemray_cluster.gang.launcher import ProgressListener, StartProgress

STAGES = ("ray", "placement", "processes", "load", "ready")


class StartOfAll:
    """Tells a listener how far all gangs are, by what each of them tells."""

    def __init__(self, num_gangs: int, progress: ProgressListener) -> None:
        """Gangs that have told nothing yet are before the first stage."""
        self._progress = progress
        self._newest: list[StartProgress | None] = [None] * num_gangs
        self.listeners: list[ProgressListener] = [partial(self._hear, gang) for gang in range(num_gangs)]
        """One for each gang."""

    def _hear(self, gang: int, event: StartProgress) -> None:
        self._newest[gang] = event
        known = [newest for newest in self._newest if newest is not None]
        if len(known) < len(self._newest):
            return
        stage = min((newest.stage for newest in known), key=STAGES.index)
        done = sum(newest.done if newest.stage == stage else newest.total for newest in known)
        detail = event.detail if event.stage == stage else ""
        self._progress(StartProgress(stage, done, sum(newest.total for newest in known), detail))
