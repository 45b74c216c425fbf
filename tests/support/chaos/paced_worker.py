"""A rank that leaves its host time between steps, as ranks on cards do."""

from __future__ import annotations

import time
from typing import Any

from typing_extensions import override

from gemray_workers.engine.planner import Inbox
from gemray_workers.messages import FromGang, ToGang
from gemray_workers.rank.worker import RankWorker

REST_S = 0.15
"""Before each step, in which a rank computes for 10 to 20 ms."""


class PacedWorker(RankWorker):
    """Rests in each step. Otherwise gangs that serve take the cores of those that start."""

    @override
    def run_offline(self, inbox: Inbox | None, **options: Any) -> None:
        super().run_offline(None if inbox is None else _RestingInbox(inbox), **options)


class _RestingInbox:
    """Looked into once a step."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def poll(self, timeout_s: float) -> list[ToGang]:
        time.sleep(REST_S)
        return self._inbox.poll(timeout_s)

    def send(self, message: FromGang) -> None:
        self._inbox.send(message)
