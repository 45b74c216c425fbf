"""The messages of one stream on their way to a client that may read slowly, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from google.protobuf.message import Message

from gemray_cluster.server.answer_size import refuse_too_large
from gemray_cluster.server.errors import ClientStalled
from gemray_cluster.server.status import Context

MOST_UNREAD_BYTES = 32 << 20
"""That a stream may hold for its client: log-probabilities of a long prompt would be hundreds of megabytes."""


class Outbox:
    """Writes behind the engine's back, so that what the engine holds does not wait for the client.

    Make it with `outbox`. A client that takes nothing for `deadline_s` has gone as far as the server is concerned.
    """

    def __init__(self, context: Context, *, deadline_s: float, max_message_bytes: int) -> None:
        self._context = context
        self._deadline_s = deadline_s
        self._max_message_bytes = max_message_bytes
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._num_unread_bytes = 0
        self.failure: BaseException | None = None
        """Why nothing more can be written."""

    def put(self, message: Message) -> None:
        """Write `message` when its turn comes.

        Raises AnswerTooLarge for one that gRPC would not carry, and ClientStalled when too much waits before it.
        """
        num_bytes = message.ByteSize()
        refuse_too_large(num_bytes, self._max_message_bytes)
        if self._num_unread_bytes > MOST_UNREAD_BYTES:
            raise ClientStalled(
                f"the client has left {self._num_unread_bytes} bytes of its stream unread, at most "
                f"{MOST_UNREAD_BYTES} are kept"
            )
        self._num_unread_bytes += num_bytes
        self._messages.put_nowait(message)

    async def flushed(self) -> None:
        """Return once everything has been written."""
        await self._messages.join()

    async def write(self) -> None:
        """Write until cancelled, or until the client is lost."""
        while self.failure is None:
            message = await self._messages.get()
            try:
                async with asyncio.timeout(self._deadline_s):
                    await self._context.write(message)
            except TimeoutError:
                self.failure = ClientStalled(f"the client read nothing for {self._deadline_s:g} s")
            except grpc.aio.BaseError:  # the call was cancelled, and this heard of it first
                self.failure = asyncio.CancelledError()
            self._num_unread_bytes -= message.ByteSize()
            self._messages.task_done()


@asynccontextmanager
async def outbox(context: Context, *, deadline_s: float, max_message_bytes: int) -> AsyncIterator[Outbox]:
    """An outbox that writes while the block runs. A client that is lost ends the block at once.

    Raises ClientStalled, or CancelledError when the client has left.
    """
    box = Outbox(context, deadline_s=deadline_s, max_message_bytes=max_message_bytes)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as block:
            writing = asyncio.create_task(box.write())
            writing.add_done_callback(lambda done: None if done.cancelled() else block.reschedule(loop.time()))
            try:
                yield box
            finally:
                writing.cancel()
                await asyncio.wait([writing])
    except TimeoutError:
        if box.failure is None:
            raise
        raise box.failure from None
