"""The message channel between the coordinator and rank 0 of a gang: both ends.

One ZeroMQ connection over TCP, authenticated and encrypted by CURVE: the coordinator makes both key pairs, binds,
and hands the address with the client's keys to rank 0. A message is two frames: its number in the direction it
travels (8 bytes, from 0) and the msgpack of one `ToGang` or `FromGang`. The numbers make a loss visible: a client must
never get a stream with a hole in it, and no request may wait endlessly because its `Submit` was lost.

What a step gave leaves in as many messages as it takes. Its ids are a few kilobytes. Log-probabilities are not: with 20
of the most likely, a prompt position takes 330 bytes, and a step may cover every position of a long prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from gemray_workers.errors import CommunicationError
from gemray_workers.messages import FromGang, SequenceDelta, StepOutput, ToGang
from gemray_workers.sampling.token_logprob import TokenLogprob

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest frame that is accepted; a prompt of 262144 ids takes 1.3 MB."""
MAX_QUEUED_MESSAGES = 100_000
"""Messages that may wait for a slow receiver before sending fails."""
MOST_DELTA_BYTES = MAX_MESSAGE_BYTES // 4
"""Bytes of the deltas in one message: well below the limit, and a coordinator that decodes them is soon free again."""
_NUMBER_BYTES = 8
_DOMAIN = "gang"
"""ZAP domain of the coordinator's socket."""
_BYTES_OF_DELTA = 1024
"""Names of the fields, the request's id, the counters of drafting."""
_BYTES_OF_TOKEN_ID = 5
_BYTES_OF_LOGPROB = 20
"""A token id and a number as msgpack, and what encloses them: for each token and for each of the most likely."""
_BYTES_OF_CHECKSUM = 9


class ChannelAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where rank 0 connects, and the keys that prove who both ends are (Z85 text, 40 characters each)."""

    endpoint: str
    """``tcp://host:port`` of the coordinator."""
    server_public_key: bytes
    client_public_key: bytes
    client_secret_key: bytes

    def __repr__(self) -> str:
        """The endpoint alone: keys stay out of logs."""
        return f"ChannelAddress({self.endpoint!r})"


class NumberedFrames:
    """Numbers what one end sends and checks the numbers of what it receives."""

    def __init__(self) -> None:
        self._sent = 0
        self._received = 0

    def wrap(self, payload: bytes) -> list[bytes]:
        """The frames of the next message to send; call `count_sent` once the socket has taken them."""
        return [self._sent.to_bytes(_NUMBER_BYTES, "little"), payload]

    def count_sent(self) -> None:
        """The message that was wrapped last is on its way."""
        self._sent += 1

    def unwrap(self, frames: Sequence[bytes]) -> bytes | None:
        """The payload of a received message, or None for one that this channel never wrote.

        Raises CommunicationError when messages between the last one and this one are missing.
        """
        if len(frames) != 2 or len(frames[0]) != _NUMBER_BYTES:
            logger.warning("dropped a message of frame sizes %s: not of this channel", [len(f) for f in frames])
            return None
        number = int.from_bytes(frames[0], "little")
        if number < self._received:
            logger.warning("dropped message %d: already received", number)
            return None
        if number > self._received:
            raise CommunicationError(f"messages {self._received}..{number - 1} between coordinator and gang were lost")
        self._received += 1
        return frames[1]


class GangChannel:
    """The coordinator's end: a bound socket that serves the one client holding the keys of `address`.

    Make and use it on one event loop.
    """

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
        _configure(self._socket)
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


class LeadChannel:
    """Rank 0's end: the inbox and outbox of its engine. Use it from one thread."""

    def __init__(self, address: ChannelAddress) -> None:
        """Connect in the background; messages sent before the coordinator answers are queued."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = address.server_public_key
        self._socket.curve_publickey = address.client_public_key
        self._socket.curve_secretkey = address.client_secret_key
        _configure(self._socket)
        self._socket.connect(address.endpoint)
        self._frames = NumberedFrames()
        self._decoder = msgspec.msgpack.Decoder[ToGang](ToGang)
        self._encoder = msgspec.msgpack.Encoder()

    def poll(self, timeout_s: float) -> list[ToGang]:
        """All messages that have arrived; waits up to `timeout_s` for a first one.

        What is not a message is logged and dropped. Raises CommunicationError when messages were lost.
        """
        messages: list[ToGang] = []
        if not self._socket.poll(round(timeout_s * 1000)):
            return messages
        while True:
            try:
                payload = self._frames.unwrap(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return messages
            if payload is None:
                continue
            try:
                messages.append(self._decoder.decode(payload))
            except msgspec.MsgspecError as error:
                logger.warning("dropped a message from the coordinator that does not decode: %s", error)

    def send(self, message: FromGang) -> None:
        """Send without waiting for the receiver: one message, or several parts of a step's output.

        Raises CommunicationError when the coordinator has left `MAX_QUEUED_MESSAGES` unread.
        """
        if not isinstance(message, StepOutput):
            self._send_one(message)
            return
        for part in split_deltas(message.deltas, MOST_DELTA_BYTES):
            self._send_one(StepOutput(part, message.stats))

    def _send_one(self, message: FromGang) -> None:
        try:
            self._socket.send_multipart(self._frames.wrap(self._encoder.encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            raise CommunicationError(f"the coordinator has left {MAX_QUEUED_MESSAGES} messages unread") from None
        self._frames.count_sent()

    def close(self) -> None:
        """Give queued messages a second to leave, then close."""
        self._context.destroy(linger=1000)


class _OneClient:
    """Lets in the holder of one key, for ZeroMQ's authentication protocol (ZAP)."""

    def __init__(self, client_public_key: bytes) -> None:
        self._client_public_key = client_public_key

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this key may connect."""
        return key == self._client_public_key


def _configure(socket: zmq.Socket[Any]) -> None:
    """Bounds that both ends share."""
    socket.sndhwm = MAX_QUEUED_MESSAGES
    socket.rcvhwm = MAX_QUEUED_MESSAGES
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.ipv6 = True
    # Notice a silently dead connection: probe each 5 s, give up 20 s after the last answer.
    socket.heartbeat_ivl = 5_000
    socket.heartbeat_timeout = 20_000


def split_deltas(deltas: Sequence[SequenceDelta], most_bytes: int) -> Iterator[list[SequenceDelta]]:
    """The deltas of a step in order, as lists of at most `most_bytes`; one list, possibly empty, when all fit in it.

    A delta whose prompt log-probabilities alone exceed that is cut; its tokens and its end go with the last part.
    """
    part: list[SequenceDelta] = []
    num_bytes = 0
    for delta in deltas:
        for piece in _pieces(delta, most_bytes):
            size = _num_bytes(piece)
            if part and num_bytes + size > most_bytes:
                yield part
                part, num_bytes = [], 0
            part.append(piece)
            num_bytes += size
    yield part


def _pieces(delta: SequenceDelta, most_bytes: int) -> Iterator[SequenceDelta]:
    """A delta, with what is too much of its prompt's log-probabilities in deltas before it."""
    rest = delta.prompt_logprobs or []
    while rest and _num_bytes(delta, rest) > most_bytes:
        most = max(1, (most_bytes - _BYTES_OF_DELTA) // max(map(_bytes_of_logprob, rest)))
        yield SequenceDelta(request_id=delta.request_id, token_ids=[], prompt_logprobs=rest[:most])
        rest = rest[most:]
    if len(rest) == len(delta.prompt_logprobs or []):
        yield delta
    else:
        yield msgspec.structs.replace(delta, prompt_logprobs=rest or None)


def _num_bytes(delta: SequenceDelta, prompt_logprobs: Sequence[TokenLogprob] | None = None) -> int:
    """Most bytes of a delta as msgpack, with other prompt log-probabilities if given."""
    if prompt_logprobs is None:
        prompt_logprobs = delta.prompt_logprobs or []
    listed = sum(map(_bytes_of_logprob, delta.logprobs or ())) + sum(map(_bytes_of_logprob, prompt_logprobs))
    return _BYTES_OF_DELTA + _BYTES_OF_TOKEN_ID * len(delta.token_ids) + listed


def _bytes_of_logprob(logprob: TokenLogprob) -> int:
    return _BYTES_OF_LOGPROB * (1 + len(logprob.top)) + _BYTES_OF_CHECKSUM
