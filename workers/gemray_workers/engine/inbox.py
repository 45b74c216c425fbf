"""An inbox without a coordinator: submits what it is given, ends when all of it has finished."""

from __future__ import annotations

from collections.abc import Iterable

from gemray_workers.messages import FromGang, SequenceDelta, StepOutput, Stop, Submit, ToGang


class LocalInbox:
    """Runs a fixed set of requests through an engine; used for the warm-up, benchmarks and tests."""

    def __init__(self, submits: Iterable[Submit]) -> None:
        self._arriving: list[ToGang] = list(submits)
        self._open = {s.request_id for s in self._arriving if isinstance(s, Submit)}
        self.deltas: list[SequenceDelta] = []
        self.steps: list[StepOutput] = []

    def poll(self, timeout_s: float) -> list[ToGang]:
        """All requests at once, then nothing, then `Stop` when the last has finished."""
        arrived, self._arriving = self._arriving, []
        return arrived if arrived or self._open else [Stop()]

    def send(self, message: FromGang) -> None:
        """Keep the deltas, and note which requests are over."""
        if isinstance(message, StepOutput):
            self.steps.append(message)
            self.deltas += message.deltas
            self._open -= {delta.request_id for delta in message.deltas if delta.finish is not None}

    def token_ids(self, request_id: str) -> list[int]:
        """Everything that was emitted for one request."""
        return [token for delta in self.deltas if delta.request_id == request_id for token in delta.token_ids]

    def last(self, request_id: str) -> SequenceDelta:
        """The delta that ended a request."""
        return next(d for d in self.deltas if d.request_id == request_id and d.finish is not None)
