"""The coordinator's end of the message channel to a gang; rank 0's end is `gemray_workers.channel`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from gemray_workers.channel import MAX_QUEUED_MESSAGES, ChannelAddress, NumberedFrames, configure
from gemray_workers.errors import CommunicationError
from gemray_workers.messages import FromGang, ToGang

logger = logging.getLogger(__name__)

_DOMAIN = "gang"


class GangChannel:
    """A bound socket that serves the one client holding the keys of `address`. Make and use it on one event loop."""

    def __init__(self, host: str) -> None:
        """Bind to a free port of `host` and make fresh keys for both ends."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context, log=logger)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=_OneClient(client_public))
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = server_secret
        self._socket.zap_domain = _DOMAIN.encode()
        configure(self._socket)
        authority = f"[{host}]" if ":" in host else host
        port = self._socket.bind_to_random_port(f"tcp://{authority}")
        self._address = ChannelAddress(
            endpoint=f"tcp://{authority}:{port}",
            server_public_key=server_public,
            client_public_key=client_public,
            client_secret_key=client_secret,
        )
        self._frames = NumberedFrames()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromGang](FromGang)

    @property
    def address(self) -> ChannelAddress:
        """What rank 0 needs to connect; holds a secret."""
        return self._address

    def post(self, message: ToGang) -> None:
        """Queue one message for rank 0, without waiting.

        Raises CommunicationError when no gang is connected or its queue is full.
        """
        frames = self._frames.wrap(self._encoder.encode(message))
        sent: asyncio.Future[Any] = asyncio.ensure_future(self._socket.send_multipart(frames))
        if not sent.done():  # zmq.asyncio sends at once whatever the socket takes
            sent.cancel()
            raise CommunicationError(
                f"no gang is connected to {self._address.endpoint}, "
                f"or it has left {MAX_QUEUED_MESSAGES} messages unread"
            )
        self._frames.count_sent()

    async def receive(self) -> FromGang:
        """The next message from rank 0; what is not of this channel is logged and dropped.

        Raises CommunicationError when messages were lost, or one of them does not decode: tokens may have been in it.
        """
        while True:
            payload = self._frames.unwrap(await self._socket.recv_multipart())
            if payload is None:
                continue
            try:
                message: FromGang = self._decoder.decode(payload)
                return message
            except msgspec.MsgspecError as error:
                raise CommunicationError(f"a message from the gang does not decode: {error}") from error

    def close(self) -> None:
        """Close at once; what has not left yet is dropped. Idempotent."""
        if self._context.closed:
            return
        self._authenticator.stop()
        self._context.destroy(linger=0)

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        self.close()


class _OneClient:
    """Lets in the holder of one key, for ZeroMQ's authentication protocol (ZAP)."""

    def __init__(self, client_public_key: bytes) -> None:
        self._client_public_key = client_public_key

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this key may connect."""
        return key == self._client_public_key
