"""Flags that say which server a command asks and what lets it in: stated once, given to each such command."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gemray.cli import options
from gemray.cli.flags import with_flags

if TYPE_CHECKING:
    from gemray.client import Client, Retry, ServerAddress

R = TypeVar("R")

PANEL = "Connection"


@dataclass(frozen=True)
class Credentials:
    """What lets a command in."""

    auth_token_file: str | None
    plaintext_token: bool
    tls: bool
    tls_ca_file: str | None
    tls_cert_file: str | None
    tls_key_file: str | None

    def at(self, address: str) -> ServerAddress:
        """The server at HOST:PORT; raises InvalidOption."""
        from gemray.client import ServerAddress

        return ServerAddress(
            address,
            self.auth_token_file,
            self.tls_ca_file,
            self.tls_cert_file,
            self.tls_key_file,
            tls=self.tls,
            plaintext_token=self.plaintext_token,
        )


@dataclass(frozen=True)
class Connection:
    """A server, and how long to try it."""

    address: str
    credentials: Credentials
    patience: float | None

    def open(self) -> Client:
        """A client; raises InvalidOption."""
        from gemray.client import Client

        return Client(self.credentials.at(self.address), retry=self._retry())

    def _retry(self) -> Retry:
        """A command that nobody answers ends at once, an answer that broke off goes on."""
        from gemray.client import Retry

        if self.patience is None:
            return Retry(first_s=0)
        return Retry(first_s=self.patience, resume_s=self.patience, starting_s=self.patience)


def quiet_grpc() -> None:
    """Keep gRPC's own log lines off stderr, unless a variable of gRPC's asks for them: errors are told in a sentence.

    To be called before gRPC is imported.
    """
    if "GRPC_TRACE" not in os.environ:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _credentials(
    *,
    auth_token_file: options.TokenFile = None,
    plaintext_token: options.PlaintextToken = False,
    tls: options.Tls = False,
    tls_ca_file: options.TlsCa = None,
    tls_cert_file: options.TlsCert = None,
    tls_key_file: options.TlsKey = None,
) -> Credentials:
    quiet_grpc()  # before the command imports it
    return Credentials(auth_token_file, plaintext_token, tls, tls_ca_file, tls_cert_file, tls_key_file)


def with_credentials(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the flags of its parameter `credentials`."""
    return with_flags(command, "credentials", _credentials, PANEL)


@with_credentials
def _connection(
    *, credentials: Credentials, address: options.Server = options.DEFAULT_SERVER, patience: options.Patience = None
) -> Connection:
    return Connection(address, credentials, patience)


def with_connection(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the flags of its parameter `connection`."""
    return with_flags(command, "connection", _connection, PANEL)
