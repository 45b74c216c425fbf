"""What the ranks' answers mean for the gang as a whole: causes before consequences, and whether they agree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gemray_cluster.gang.client import GangUnavailable
from gemray_cluster.gang.launcher import RankDied
from gemray_workers.errors import CommunicationError, GemrayError
from gemray_workers.messages import ModelInfo
from gemray_workers.rank.process import RankFacts


def errors_by_cause(tasks: Sequence[asyncio.Future[Any]]) -> list[tuple[int, BaseException]]:
    """(rank, error) of the tasks that failed, one task a rank: causes before consequences.

    A dead process makes its peers' collectives fail, so deaths come first and failed communication last.
    """
    errors = [
        (rank, error)
        for rank, task in enumerate(tasks)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None
    ]
    return sorted(errors, key=lambda rank_error: _distance_from_cause(rank_error[1]))


def account(errors: Sequence[tuple[int, BaseException]]) -> str:
    """All of `errors` in one line."""
    return "; ".join(f"rank {rank}: {in_words(error)}" for rank, error in errors)


def in_words(error: BaseException) -> str:
    """An error's message; with its type unless the message was written for users."""
    text = str(error)
    return text if isinstance(error, GemrayError) and text else f"{type(error).__name__}: {text}"


def require_same_versions(facts: Sequence[RankFacts]) -> None:
    """Raise GangUnavailable when ranks run different software."""
    for rank, fact in enumerate(facts):
        if fact.versions != facts[0].versions:
            raise GangUnavailable(
                f"ranks run different software: rank 0 on {facts[0].host} has {facts[0].versions}, "
                f"rank {rank} on {fact.host} has {fact.versions}"
            )


def same_model(models: Sequence[ModelInfo]) -> ModelInfo:
    """The model that all ranks loaded. Raises GangUnavailable when they disagree, naming the fields."""
    first = models[0]
    for rank, model in enumerate(models):
        differing = [name for name in ModelInfo.__struct_fields__ if getattr(model, name) != getattr(first, name)]
        if differing:
            told = ", ".join(f"{name}: {getattr(first, name)!r} and {getattr(model, name)!r}" for name in differing)
            raise GangUnavailable(f"ranks 0 and {rank} disagree about the model: {told}")
    return first


def _distance_from_cause(error: BaseException) -> int:
    if isinstance(error, RankDied):
        return 0
    return 2 if isinstance(error, CommunicationError) else 1
