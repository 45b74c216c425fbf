"""What a port may be sent: HTTP/2 as it should be, as it should not be, and what is no HTTP/2 at all."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from random import Random

from gemray.v1 import generation_pb2 as pb
from support.fuzz.mutate import mutated_bytes

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED = 1, 4, 8
GENERATE = "/gemray.v1.GenerationService/Generate"
SILENCE_S = 0.2
"""After which the server has said what it has to say."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _text(text: str) -> bytes:
    """A literal of HPACK, without Huffman's code."""
    data = text.encode("latin-1")
    length = len(data)
    if length < 127:
        return bytes([length]) + data
    encoded, length = b"\x7f", length - 127
    while length > 127:
        encoded, length = encoded + bytes([length & 127 | 128]), length >> 7
    return encoded + bytes([length]) + data


def headers(changes: Mapping[str, str | None] | None = None) -> bytes:
    """The header block of a call; None leaves one out."""
    fields: dict[str, str | None] = {
        ":method": "POST", ":scheme": "http", ":path": GENERATE, ":authority": "localhost",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    fields |= changes or {}
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items() if value is not None)


def message(body: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """A gRPC message, as DATA frames hold it."""
    return struct.pack(">BI", compressed, len(body) if length is None else length) + body


def session(block: bytes, body: bytes, *, ends: bool = True) -> bytes:
    """A connection with one call."""
    start = PREFACE + frame(SETTINGS, 0, 0)
    return start + frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM if ends else 0, 1, body)


HI = pb.GenerateRequest(text="Hi").SerializeToString()
CALL = session(headers(), message(HI))

SESSIONS: dict[str, bytes] = {
    "a call": CALL,
    "nothing": b"",
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a TLS hello": bytes.fromhex("16030100c8010000c40303") + bytes(range(200)),
    "noise": Random(1).randbytes(5000),
    "half a preface": PREFACE[:10],
    "a preface alone": PREFACE,
    "half a frame": PREFACE + frame(SETTINGS, 0, 0)[:5],
    "a frame cut short": CALL[:-3],
    "settings of a wrong length": PREFACE + frame(SETTINGS, 0, 0, b"\0" * 5),
    "settings out of range": PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31)),
    "a frame that is too long": PREFACE + frame(SETTINGS, 0, 0) + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(100_000),
    "frames of no kind": PREFACE + frame(SETTINGS, 0, 0) + b"".join(frame(k, 255, 1, b"x") for k in range(10, 256)),
    "data of no stream": PREFACE + frame(SETTINGS, 0, 0) + frame(DATA, 0, 0, b"x") + frame(DATA, 0, 7, b"x"),
    "headers of an even stream": PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 2, headers()),
    "headers that are no HPACK": session(b"\xff" * 200, message(HI)),
    "padding longer than the frame": PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff"),
    "headers without an end": PREFACE
    + frame(SETTINGS, 0, 0)
    + frame(HEADERS, 0, 1, headers())
    + frame(CONTINUATION, 0, 1, b"\0" + _text("x-more") + _text("y")) * 3000,
    "huge headers": session(headers({"x-large": "y" * 15_000}), message(HI)),
    "many headers": session(headers({f"x-{i}": "y" * 10 for i in range(700)}), message(HI)),
    "another content type": session(headers({"content-type": "text/html"}), message(HI)),
    "no content type": session(headers({"content-type": None}), message(HI)),
    "another method": session(headers({":method": "GET"}), message(HI)),
    "no path": session(headers({":path": None}), message(HI)),
    "a path of no service": session(headers({":path": "/x/Y"}), message(HI)),
    "a long path": session(headers({":path": "/" + "x" * 10_000}), message(HI)),
    "a bad timeout": session(headers({"grpc-timeout": "-5q"}), message(HI)),
    "an unknown encoding": session(headers({"grpc-encoding": "zip"}), message(HI, compressed=1)),
    "gzip that is none": session(headers({"grpc-encoding": "gzip"}), message(HI, compressed=1)),
    "a compressed flag of 255": session(headers(), message(HI, compressed=255)),
    "a message longer than said": session(headers(), message(HI, length=2)),
    "a message shorter than said": session(headers(), message(HI, length=200)),
    "a message of 4 GiB": session(headers(), message(HI, length=(1 << 32) - 1)),
    "several messages": session(headers(), message(HI) * 50),
    "half a message": session(headers(), message(HI)[:3]),
    "a call that never ends": session(headers(), message(HI), ends=False),
    "no window": PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)) + CALL[len(PREFACE) + 9 :],
    "window updates of 0": CALL + frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\0") + frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\0"),
    "windows that run over": CALL + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 3,
    "calls that are reset at once": PREFACE
    + frame(SETTINGS, 0, 0)
    + b"".join(
        frame(HEADERS, END_HEADERS, stream, headers()) + frame(RST_STREAM, 0, stream, b"\0\0\0\x08")
        for stream in range(1, 2001, 2)
    ),
    "a promise": CALL + frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2" + headers()),
    "a farewell": CALL + frame(GOAWAY, 0, 0, bytes(8)),
    "the same stream twice": CALL + frame(HEADERS, END_HEADERS, 1, headers()),
}
PINGS = PREFACE + frame(SETTINGS, 0, 0) + b"".join(frame(PING, 0, 0, struct.pack(">Q", i)) for i in range(200))


async def send(
    address: str,
    data: bytes,
    *,
    hangs_up: bool = False,
    silence_s: float = SILENCE_S,
    enough: Callable[[bytes], bool] = lambda _: False,
) -> bytes:
    """What the server answers to these bytes until it is enough, or the server closes or falls silent.

    `hangs_up` closes this side's half behind them.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        writer.write(data)
        await writer.drain()
        if hangs_up:
            writer.write_eof()
        while not enough(answer) and (chunk := await asyncio.wait_for(reader.read(1 << 16), silence_s)):
            answer += chunk
    except (TimeoutError, OSError):  # closed by the other side, which may come at any time
        pass
    finally:
        writer.close()
    return answer


def kinds_of_frames(answer: bytes) -> list[int]:
    """The kinds of the whole frames among the bytes."""
    kinds, at = [], 0
    while at + 9 <= len(answer):
        kinds.append(answer[at + 3])
        at += 9 + int.from_bytes(answer[at : at + 3], "big")
    return kinds


def damaged_session(random: Random) -> bytes:
    """A session of the table, or what its call begins with, with bytes changed."""
    sessions = list(SESSIONS.values())
    return mutated_bytes(random.choice(sessions)[:4000], [CALL], random)
