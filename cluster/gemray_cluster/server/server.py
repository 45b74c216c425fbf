"""The gRPC server: services, health and reflection on one port; drains before it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gemray.channel_options import from_here, host_and_port, listening_in_words
from gemray.v1 import generation_pb2_grpc
from gemray_cluster.gang.client import ReplicatedGang
from gemray_cluster.server.auth import BearerAuth
from gemray_cluster.server.channel_options import server_options
from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.first_message import FirstMessage
from gemray_cluster.server.health import HealthReporter
from gemray_cluster.server.live_calls import LiveCalls
from gemray_cluster.server.reflection import add_reflection
from gemray_cluster.server.request_limiter import RequestLimiter
from gemray_cluster.server.requests import RequestReader
from gemray_cluster.server.service import SERVICE, SERVICE_NAME, GenerationService
from gemray_cluster.server.text_work import TextWork
from gemray_cluster.server.tls_files import server_credentials
from gemray_cluster.server.wire import ReadableRequests
from gemray_workers.errors import AddressUnavailable

CLOSE_GRACE_S = 4.0
"""For calls that are just sending their last message, or why there is none."""
GO_ON = (
    "ask again, another server or this one when it is back, with the same sampling.seed and the tokens so far as "
    "emitted_token_ids"
)
"""What a client can do about a call that is cut."""


class GenerationServer:
    """A listening server. It does not own the gang: whoever started that stops it."""

    def __init__(
        self,
        config: ServerConfig,
        gang: ReplicatedGang,
        reader: RequestReader,
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    ) -> None:
        """`interceptors` see every call that brings a request, refused ones too: they come before authentication."""
        self._config = config
        self._interceptors = interceptors
        self.limiter = RequestLimiter(config.max_live_requests)
        self._health = HealthReporter(gang, self.limiter, (SERVICE_NAME,))
        self._calls = LiveCalls()
        self._text_work = TextWork()
        self._service = GenerationService(gang, reader, self.limiter, self._calls, self._text_work, config)
        self._server: grpc.aio.Server | None = None
        self._health_task: asyncio.Task[None] | None = None
        self._going_away: asyncio.Task[None] | None = None
        self.port = config.port
        """The port that was bound, once started."""

    @property
    def address(self) -> str:
        """host:port for clients on this machine."""
        return host_and_port(from_here(self._config.host), self.port)

    @property
    def listens_on(self) -> str:
        """Where the server listens, in words that end with `address`."""
        return listening_in_words(self._config.host, self.port)

    async def start(self) -> None:
        """Bind and serve; raises AddressUnavailable, and InvalidField for unreadable TLS or token files."""
        config = self._config
        auth = [BearerAuth.of_file(config.auth_token_file)] if config.auth_token_file else []
        credentials = server_credentials(config)
        _check_address(config.host, config.port)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"]
        interceptors = [FirstMessage(), *self._interceptors, *auth, ReadableRequests(SERVICE, health)]
        server = grpc.aio.server(
            interceptors=interceptors, options=server_options(config.max_message_bytes, config.max_connection_age_s)
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        add_reflection(server, (SERVICE_NAME, health.full_name))
        where = host_and_port(config.host, config.port)
        try:
            self.port = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
        except RuntimeError as error:
            raise AddressUnavailable(f"cannot listen on {where}: {error}") from error
        await self._health.update()
        await server.start()
        self._server = server
        self._health_task = asyncio.create_task(self._health.run())

    async def report_health(self) -> None:
        """Make health checks tell the present state at once; by itself it follows within a fraction of a second."""
        await self._health.update()

    async def drain(self) -> int:
        """Take no more requests and wait for the live ones; how many outlast the deadline, and are cut.

        After a notice connections get a GOAWAY, with which clients move to another server, and no new ones are taken.
        Calls that are cut end with UNAVAILABLE and a sentence by which their clients can go on elsewhere.
        """
        self.limiter.close()
        await self._health.update()
        if self._going_away is None:
            self._going_away = asyncio.create_task(self._go_away())
        try:
            await asyncio.wait_for(self._calls.wait_for_none(), self._config.drain_deadline_s)
        except TimeoutError:
            return self._calls.cut(
                f"the server ends, and this call had not within drain_deadline_s = {self._config.drain_deadline_s:g}: "
                f"{GO_ON}"
            )
        return 0

    async def close(self) -> None:
        """End every call that is left and stop listening. Idempotent."""
        self.limiter.close()
        if self._health_task is not None:
            self._health_task.cancel()
            await asyncio.wait([self._health_task])
            self._health_task = None
        if self._server is not None:
            await self._health.update()
            self._calls.cut(f"the server ends: {GO_ON}")
            await self._server.stop(CLOSE_GRACE_S)
            self._server = None
        if self._going_away is not None:
            self._going_away.cancel()
            await asyncio.wait([self._going_away])
            self._going_away = None
        self._text_work.close()

    async def _go_away(self) -> None:
        """Tell connections to go away; what runs on them goes on until `close`."""
        await asyncio.sleep(self._config.drain_notice_s)
        if self._server is not None:
            await self._server.stop(self._config.drain_deadline_s + CLOSE_GRACE_S)


def _check_address(host: str, port: int) -> None:
    """gRPC does not say why it cannot bind, so the address is tried first with a plain socket."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise AddressUnavailable(f"cannot listen on {host_and_port(host, port)}: {error.strerror or error}") from error
