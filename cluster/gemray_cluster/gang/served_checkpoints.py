"""One server, one model: gangs that come later, in place of a failed one or beside it, read what the first one read."""

from __future__ import annotations

from collections.abc import Sequence

from gemray_workers.checkpoint.identity import CheckpointIdentity
from gemray_workers.config import EngineConfig
from gemray_workers.errors import CheckpointError

_SHOWN = 12
"""Digits of a hash."""


class ServedCheckpoints:
    """What the first gang's ranks found in the directories of model and drafters, which holds for all that follow.

    Requests that a gang leaves go on in another one: with other weights half an answer would be another model's.
    """

    def __init__(self) -> None:
        """Nothing has been found yet."""
        self._first: list[CheckpointIdentity] | None = None

    def require(self, found: Sequence[CheckpointIdentity], engine: EngineConfig, host: str) -> None:
        """Note what the first rank found, and raise CheckpointError when a later one found something else.

        Args:
            found: in the model's directory, then in the drafters'.
            engine: names the directories.
            host: where they are.
        """
        if self._first is None:
            self._first = list(found)
        for path, first, here in zip((engine.model_path, *engine.drafter_paths), self._first, found, strict=True):
            if here.hash != first.hash:
                what = f"a checkpoint with hash {here.hash[:_SHOWN]}" if here.hash else "no weights"
                began = f"hash {first.hash[:_SHOWN]}" if first.hash else "no weights"
                raise CheckpointError(
                    f"{path} on {host} holds {what}, and this server began with {began}: start the server again to "
                    "serve it, or put the same files on every node"
                )
