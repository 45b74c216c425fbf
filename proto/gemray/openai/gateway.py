"""The gemray server as an HTTP endpoint uses it: calls under the caller's token, errors as HTTP has them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from gemray.client import AsyncClient, ClientError
from gemray.client.server_address import Metadata
from gemray.openai.errors import HttpError, http_error_of
from gemray.openai.settings import GatewaySettings
from gemray.openai.streaming import with_pauses
from gemray.v1 import generation_pb2 as pb

INFO_S = 10.0
"""How long the server may take to say what it serves, or how it is."""


@dataclass(frozen=True)
class Caller:
    """Who asks."""

    metadata: Metadata
    """The caller's token, where it has one and it may go over this connection."""
    hint: str = ""
    """What to say if the server lets the caller not in."""


class Gateway:
    """One server; used in one event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self._client = AsyncClient(settings.server, retry=settings.retry, max_message_bytes=settings.max_bytes)

    async def close(self) -> None:
        """End what runs."""
        await self._client.close()

    def caller(self, authorization: str | None) -> Caller:
        """The caller with this header; raises HttpError for one that cannot be handed on."""
        if authorization is None:
            return Caller(())
        if not self.settings.server.takes_tokens:
            hint = (
                "; the token was not handed on, as this gateway reaches the server in plain text over the network: "
                "start it with --tls, or with --plaintext-token"
            )
            return Caller((), hint)
        if not all(" " <= char <= "~" for char in authorization):
            raise HttpError(401, "authorization: Bearer TOKEN, of visible ASCII characters", code="invalid_api_key")
        return Caller((("authorization", authorization),))

    async def model_info(self, caller: Caller) -> pb.GetModelInfoResponse:
        """What the server says of its model; raises HttpError."""
        with http_errors(caller):
            return await self._client.model_info(timeout_s=INFO_S, metadata=caller.metadata)

    async def is_serving(self) -> bool:
        """Whether the server is ready; False where nobody answers."""
        try:
            return await self._client.is_serving(timeout_s=INFO_S)
        except ClientError:
            return False

    async def generate(self, request: pb.GenerateStreamRequest, caller: Caller) -> pb.GenerateResponse:
        """The whole answer; raises HttpError."""
        unary = pb.GenerateRequest.FromString(request.SerializeToString())
        with http_errors(caller):
            return await self._client.generate(unary, timeout_s=self.settings.timeout_s, metadata=caller.metadata)

    async def stream(
        self, request: pb.GenerateStreamRequest, caller: Caller
    ) -> AsyncGenerator[pb.GenerateStreamResponse | None, None]:
        """The answer as it grows, and None each time that nothing has come for a while; raises HttpError.

        Closing it early stops the generation.
        """
        answer = self._client.stream(request, timeout_s=self.settings.timeout_s, metadata=caller.metadata)
        with http_errors(caller):
            async with answer, aclosing(with_pauses(answer)) as messages:
                async for message in messages:
                    yield message


@contextmanager
def http_errors(caller: Caller) -> Iterator[None]:
    """What fails inside is told as HttpError."""
    try:
        yield
    except ClientError as error:
        raise http_error_of(error, hint_401=caller.hint) from None
