"""A client for threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from gemray.channel_options import DEFAULT_MAX_MESSAGE_BYTES
from gemray.client.closing import ClosingChannel
from gemray.client.connection import HEALTH_CHECK, OF_ALL_SERVICES, SERVING, open_channel
from gemray.client.errors import Cancelled, InvalidOption, error_of
from gemray.client.retry import Attempts, Continuation, Retry, checked, seeded
from gemray.client.server_address import Metadata, ServerAddress
from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc

LONGEST_TIMEOUT_S = 365 * 86400.0
"""Longer deadlines are none: from 1e10 s on gRPC takes them for the past."""


class Client:
    """A client of one server; threads may share it.

    Calls raise ClientError. On UNAVAILABLE they are tried again, with the same seed, for as long as `retry` says: a
    stream goes on behind what it has given, so that its messages are those of one call. In bfloat16 that is so up to
    near ties, as with any two calls. A server that has been replaced by one of another checkpoint does not go on with
    it: RequestRefused, FAILED_PRECONDITION. `metadata` goes with a call beside that of the server's address.
    """

    def __init__(
        self,
        server: ServerAddress | str,
        *,
        retry: Retry | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        """Raise InvalidOption for options that cannot be; the server is not asked before the first call.

        Args:
            server: HOST:PORT, or with what lets the client in.
            retry: patience with a server that does not serve now.
            max_message_bytes: largest message to send or take; a server has its own limit.
        """
        self.server = ServerAddress(server) if isinstance(server, str) else server
        self._retry = retry or Retry()
        self._channel = ClosingChannel(open_channel(self.server, max_message_bytes), self.server.address)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.GenerateResponse:
        """The whole answer, in one message. A try after UNAVAILABLE begins again, and gives the same answer."""
        answer: pb.GenerateResponse = self._call(self._stub.Generate, seeded(request), timeout_s, metadata)
        return answer

    def stream(
        self, request: pb.GenerateStreamRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> Answer:
        """The answer as it grows. Iterate over it; closing or cancelling it stops the generation."""
        return Answer(
            self._stub.GenerateStream, self.server, request, Attempts(self._retry, checked_timeout(timeout_s)), metadata
        )

    def tokenize(
        self, request: pb.TokenizeRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.TokenizeResponse:
        """The token ids that a generation would run."""
        answer: pb.TokenizeResponse = self._call(
            self._stub.Tokenize, checked(request, pb.TokenizeRequest), timeout_s, metadata
        )
        return answer

    def detokenize(
        self, request: pb.DetokenizeRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.DetokenizeResponse:
        """The text of token ids."""
        answer: pb.DetokenizeResponse = self._call(
            self._stub.Detokenize, checked(request, pb.DetokenizeRequest), timeout_s, metadata
        )
        return answer

    def model_info(self, *, timeout_s: float | None = None, metadata: Metadata = ()) -> pb.GetModelInfoResponse:
        """The served model, its shards and memory."""
        answer: pb.GetModelInfoResponse = self._call(
            self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s, metadata
        )
        return answer

    def server_stats(self, *, timeout_s: float | None = None, metadata: Metadata = ()) -> pb.GetServerStatsResponse:
        """Load and counters since the server's start."""
        answer: pb.GetServerStatsResponse = self._call(
            self._stub.GetServerStats, pb.GetServerStatsRequest(), timeout_s, metadata
        )
        return answer

    def is_serving(self, *, timeout_s: float | None = None) -> bool:
        """Whether the server's health says SERVING; it asks for no token. Raises ClientError where nobody answers."""
        check = self._channel.unary_unary(HEALTH_CHECK, bytes, bytes)
        try:
            answer: bytes = check(OF_ALL_SERVICES, timeout=checked_timeout(timeout_s))
        except grpc.RpcError as error:
            raise error_of(self.server.address, error) from None
        return answer == SERVING

    def close(self) -> None:
        """End what runs. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Any, request: Any, timeout_s: float | None, metadata: Metadata) -> Any:
        attempts = Attempts(self._retry, checked_timeout(timeout_s))
        wait = threading.Event().wait
        while True:
            try:
                return method(request, metadata=(*self.server.metadata, *metadata), timeout=attempts.timeout)
            except grpc.RpcError as error:
                wait(attempts.delay_after(error_of(self.server.address, error)))


class Answer(Iterator[pb.GenerateStreamResponse]):
    """An answer as it grows: deltas, then the final message."""

    def __init__(
        self,
        method: Any,
        server: ServerAddress,
        request: pb.GenerateStreamRequest,
        attempts: Attempts,
        metadata: Metadata,
    ) -> None:
        self._method = method
        self._server = server
        self._continuation = Continuation(request)
        self._attempts = attempts
        self._metadata = metadata
        self._ended = threading.Event()
        self._call: Any = None

    def __next__(self) -> pb.GenerateStreamResponse:
        """The next message; raises ClientError, and Cancelled after `cancel`."""
        while True:
            if self._ended.is_set():
                if self._attempts.cancelled:
                    raise Cancelled(f"{self._server.address}: the client has cancelled the call")
                raise StopIteration
            try:
                return self._next()
            except StopIteration:
                self._ended.set()
                raise
            except grpc.RpcError as error:
                if self._continuation.is_whole:
                    self._ended.set()
                    raise StopIteration from None
                self._call = None
                if self._attempts.cancelled:
                    continue
                told = error_of(self._server.address, error)
            self._ended.wait(self._delay_after(told))

    def _next(self) -> pb.GenerateStreamResponse:
        if self._call is None:
            self._call = self._method(
                self._continuation.request(),
                metadata=(*self._server.metadata, *self._metadata),
                timeout=self._attempts.timeout,
            )
        while True:
            message: pb.GenerateStreamResponse = next(self._call)
            if not self._continuation.is_told:
                self._continuation.answered_by(self._call.initial_metadata())
            told = self._continuation.take(message)
            if told is not None:  # what was told before is no progress
                self._attempts.progress()
                return told

    def _delay_after(self, told: Any) -> float:
        try:
            return self._attempts.delay_after(told)
        except Exception:
            self._ended.set()
            raise

    def cancel(self) -> None:
        """Stop the generation, from any thread: the iteration ends with Cancelled. Nothing once it is over."""
        if self._ended.is_set():
            return
        self._attempts.cancelled = True
        self._ended.set()
        call = self._call
        if call is not None:
            call.cancel()

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def checked_timeout(timeout_s: float | None, name: str = "timeout_s") -> float | None:
    """A deadline of a call, None where it is so far that gRPC has no number for it.

    Raises InvalidOption with the option's `name`.
    """
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        raise InvalidOption(name, timeout_s, "seconds, more than 0")
    return None if timeout_s is None or timeout_s > LONGEST_TIMEOUT_S else timeout_s
