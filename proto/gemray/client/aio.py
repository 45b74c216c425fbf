"""A client for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc

from gemray.channel_options import DEFAULT_MAX_MESSAGE_BYTES, client_options
from gemray.client.closing import ClosingChannel
from gemray.client.connection import HEALTH_CHECK, OF_ALL_SERVICES, SERVING
from gemray.client.errors import Cancelled, error_of
from gemray.client.retry import Attempts, Continuation, Retry, checked, seeded
from gemray.client.server_address import Metadata, ServerAddress
from gemray.client.sync import checked_timeout
from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc


class AsyncClient:
    """As `Client`, for one event loop. Cancelling a task ends its call and stops its generation."""

    def __init__(
        self,
        server: ServerAddress | str,
        *,
        retry: Retry | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        """As `Client`; to be called in the loop."""
        self.server = ServerAddress(server) if isinstance(server, str) else server
        self._retry = retry or Retry()
        credentials = self.server.credentials()
        options = client_options(self.server.address, max_message_bytes)
        channel = (
            grpc.aio.insecure_channel(self.server.address, options=options)
            if credentials is None
            else grpc.aio.secure_channel(self.server.address, credentials, options=options)
        )
        self._channel = ClosingChannel(channel, self.server.address)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def generate(
        self, request: pb.GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.GenerateResponse:
        """The whole answer, in one message. A try after UNAVAILABLE begins again, and gives the same answer."""
        answer: pb.GenerateResponse = await self._call(self._stub.Generate, seeded(request), timeout_s, metadata)
        return answer

    def stream(
        self, request: pb.GenerateStreamRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> AsyncAnswer:
        """The answer as it grows. Iterate over it; closing or cancelling it stops the generation."""
        attempts = Attempts(self._retry, checked_timeout(timeout_s))
        return AsyncAnswer(self._stub.GenerateStream, self.server, request, attempts, metadata)

    async def tokenize(
        self, request: pb.TokenizeRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.TokenizeResponse:
        """The token ids that a generation would run."""
        tokens: pb.TokenizeResponse = await self._call(
            self._stub.Tokenize, checked(request, pb.TokenizeRequest), timeout_s, metadata
        )
        return tokens

    async def detokenize(
        self, request: pb.DetokenizeRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.DetokenizeResponse:
        """The text of token ids."""
        answer: pb.DetokenizeResponse = await self._call(
            self._stub.Detokenize, checked(request, pb.DetokenizeRequest), timeout_s, metadata
        )
        return answer

    async def model_info(self, *, timeout_s: float | None = None, metadata: Metadata = ()) -> pb.GetModelInfoResponse:
        """The served model, its shards and memory."""
        info: pb.GetModelInfoResponse = await self._call(
            self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s, metadata
        )
        return info

    async def server_stats(
        self, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.GetServerStatsResponse:
        """Load and counters since the server's start."""
        stats: pb.GetServerStatsResponse = await self._call(
            self._stub.GetServerStats, pb.GetServerStatsRequest(), timeout_s, metadata
        )
        return stats

    async def is_serving(self, *, timeout_s: float | None = None) -> bool:
        """Whether the server's health says SERVING; it asks for no token. Raises ClientError where nobody answers."""
        check = self._channel.unary_unary(HEALTH_CHECK, bytes, bytes)
        try:
            answer: bytes = await check(OF_ALL_SERVICES, timeout=checked_timeout(timeout_s))
        except grpc.aio.AioRpcError as error:
            raise error_of(self.server.address, error) from None
        return answer == SERVING

    async def close(self) -> None:
        """End what runs. Idempotent."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any, timeout_s: float | None, metadata: Metadata) -> Any:
        attempts = Attempts(self._retry, checked_timeout(timeout_s))
        while True:
            try:
                return await method(request, metadata=(*self.server.metadata, *metadata), timeout=attempts.timeout)
            except grpc.aio.AioRpcError as error:
                told = error_of(self.server.address, error)
            await asyncio.sleep(attempts.delay_after(told))


class AsyncAnswer(AsyncIterator[pb.GenerateStreamResponse]):
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
        self._ended = asyncio.Event()
        self._call: Any = None
        self._messages: Any = None

    async def __anext__(self) -> pb.GenerateStreamResponse:
        """The next message; raises ClientError, and Cancelled after `cancel`."""
        while not self._ended.is_set():
            try:
                return await self._next()
            except asyncio.CancelledError:
                if not self._attempts.cancelled:  # not this call's end but its task's
                    self.cancel()
                    raise
            except StopAsyncIteration:
                self._ended.set()
                raise
            except grpc.aio.AioRpcError as error:
                if self._continuation.is_whole:
                    self._ended.set()
                    break
                self._call = None
                if self._attempts.cancelled:
                    break
                await self._wait_after(error)
        if self._attempts.cancelled:
            raise Cancelled(f"{self._server.address}: the client has cancelled the call")
        raise StopAsyncIteration

    async def _next(self) -> pb.GenerateStreamResponse:
        if self._call is None:
            self._call = self._method(
                self._continuation.request(),
                metadata=(*self._server.metadata, *self._metadata),
                timeout=self._attempts.timeout,
            )
            self._messages = aiter(self._call)
        while True:
            message: pb.GenerateStreamResponse = await anext(self._messages)
            if not self._continuation.is_told:
                self._continuation.answered_by(await self._call.initial_metadata())
            told = self._continuation.take(message)
            if told is not None:  # what was told before is no progress
                self._attempts.progress()
                return told

    async def _wait_after(self, error: grpc.aio.AioRpcError) -> None:
        """Wait before the next try, at most until `cancel`; raises ClientError when there is to be none."""
        try:
            delay = self._attempts.delay_after(error_of(self._server.address, error))
        except BaseException:
            self._ended.set()
            raise
        try:
            await asyncio.wait_for(self._ended.wait(), delay)
        except TimeoutError:
            return

    def cancel(self) -> None:
        """Stop the generation: the iteration ends with Cancelled. Nothing once it is over."""
        if self._ended.is_set():
            return
        self._attempts.cancelled = True
        self._ended.set()
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
