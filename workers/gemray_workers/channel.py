"""Rank 0's end of the message channel between the coordinator and a gang.

One ZeroMQ connection over TCP, authenticated and encrypted by CURVE: the coordinator makes both key pairs, binds,
and hands the address with the client's keys to rank 0. A message is two frames: its number in the direction it
travels (8 bytes, from 0) and the msgpack of one `ToGang` or `FromGang`. The numbers make a loss visible: a client must
never get a stream with a hole in it, and no request may wait endlessly because its `Submit` was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from gemray_workers.errors import CommunicationError
from gemray_workers.messages import FromGang, ToGang

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest frame that is accepted; a prompt of 262144 ids takes 1.3 MB."""
MAX_QUEUED_MESSAGES = 100_000
"""Messages that may wait for a slow receiver before sending fails."""
_NUMBER_BYTES = 8


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


class LeadChannel:
    """The inbox and outbox of rank 0's engine. Use it from one thread."""

    def __init__(self, address: ChannelAddress) -> None:
        """Connect in the background; messages sent before the coordinator answers are queued."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = address.server_public_key
        self._socket.curve_publickey = address.client_public_key
        self._socket.curve_secretkey = address.client_secret_key
        configure(self._socket)
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
        """Send without waiting for the receiver.

        Raises CommunicationError when the coordinator has left `MAX_QUEUED_MESSAGES` unread.
        """
        try:
            self._socket.send_multipart(self._frames.wrap(self._encoder.encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            raise CommunicationError(f"the coordinator has left {MAX_QUEUED_MESSAGES} messages unread") from None
        self._frames.count_sent()

    def close(self) -> None:
        """Give queued messages a second to leave, then close."""
        self._context.destroy(linger=1000)


def configure(socket: zmq.Socket[Any]) -> None:
    """Bounds that both ends share."""
    socket.sndhwm = MAX_QUEUED_MESSAGES
    socket.rcvhwm = MAX_QUEUED_MESSAGES
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.ipv6 = True
    # Notice a silently dead connection: probe each 5 s, give up 20 s after the last answer.
    socket.heartbeat_ivl = 5_000
    socket.heartbeat_timeout = 20_000
