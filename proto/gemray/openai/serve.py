"""The gateway as a process: an open port, uvicorn, and an end in order."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override

from gemray.channel_options import host_and_port, listening_in_words
from gemray.client import InvalidOption
from gemray.client.tls import read_key_pair
from gemray.openai.certificate import WatchedCertificate

logger = logging.getLogger(__name__)

RELOAD = "SIGHUP: the certificate is read again when it changes, all else at a start; SIGTERM ends the gateway"
GRACE_S = 30
"""How long answers may go on once the gateway is told to end."""
MAX_PORT = 65535
TICKS_OF_A_LOOK = 10
"""A tick is a tenth of a second."""


@dataclass(frozen=True)
class Listening:
    """Where the gateway listens; raises InvalidOption."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    tls_cert_file: str | None = None
    tls_key_file: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise InvalidOption("port", self.port, f"0 to {MAX_PORT}")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise InvalidOption("http_tls_key_file", self.tls_key_file, "set together with http_tls_cert_file")
        if self.tls_cert_file is not None and self.tls_key_file is not None:
            try:
                read_key_pair(self.tls_key_file, self.tls_cert_file)
            except InvalidOption as error:  # the client's own pair has the same names
                raise InvalidOption(f"http_{error.field}", error.value, error.allowed) from error

    @property
    def scheme(self) -> str:
        """What the URLs begin with."""
        return "http" if self.tls_cert_file is None else "https"

    def open(self) -> socket.socket:
        """The open port; raises InvalidOption where it is taken, or the host is none of this machine's."""
        try:
            family, _, _, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            return socket.create_server(address[:2], family=family, backlog=2048)
        except OSError as error:
            raise InvalidOption(
                "host, port",
                host_and_port(self.host, self.port),
                f"an address of this machine with a free port ({_reason(error)})",
            ) from error


def _reason(error: OSError) -> str:
    """What went wrong, without the address that Python's library puts behind it."""
    return (error.strerror or str(error)).partition(" (while ")[0]


async def serve(
    app: ASGIApp, listening: Listening, told: Callable[[str], None], *, ends_at_hangup: bool = False
) -> None:
    """Serve until SIGTERM or Ctrl-C, which let answers finish; a second one does not.

    `told` gets the base URL, in words, once the port is open. SIGHUP is such a signal where it `ends_at_hangup`, as
    where a terminal controls the process, whose end it tells of; else it changes nothing. It stays ignored where nohup
    has it so. Raises InvalidOption.
    """
    with listening.open() as port:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
            ssl_certfile=listening.tls_cert_file,
            ssl_keyfile=listening.tls_key_file,
        )
        host, number = port.getsockname()[:2]
        where = listening_in_words(host, number, f"{listening.scheme}://{{}}/v1")
        await _Server(config, lambda: told(where), ends_at_hangup=ends_at_hangup).serve(sockets=[port])


def _say_what_is_read_again(number: int, frame: FrameType | None) -> None:
    del number, frame
    logger.warning(RELOAD)


class _Server(uvicorn.Server):
    """A server that says when it is ready, and whose end by a signal is none by an exception."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], *, ends_at_hangup: bool) -> None:
        super().__init__(config)
        self._ready = ready
        self._ends_at_hangup = ends_at_hangup
        self._certificate: WatchedCertificate | None = None

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        config = self.config
        if config.ssl is not None and config.ssl_certfile is not None and config.ssl_keyfile is not None:
            self._certificate = WatchedCertificate(config.ssl, str(config.ssl_certfile), str(config.ssl_keyfile))
        if not self.should_exit:
            self._ready()

    @override
    async def on_tick(self, counter: int) -> bool:
        if self._certificate is not None and counter % TICKS_OF_A_LOOK == 0:
            self._certificate.renew()
        return await super().on_tick(counter)

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]]
        handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM), self.handle_exit)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = self.handle_exit if self._ends_at_hangup else _say_what_is_read_again
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
