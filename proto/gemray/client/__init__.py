"""Clients of a gemray server, for programs: `Client`, `AsyncClient`, and what they need."""

from gemray.client.aio import AsyncAnswer, AsyncClient
from gemray.client.answers import answers_of
from gemray.client.errors import (
    Cancelled,
    ClientClosed,
    ClientError,
    DeadlinePassed,
    InvalidOption,
    RequestFailed,
    RequestRefused,
    ServerBusy,
    ServerUnreachable,
)
from gemray.client.retry import Retry
from gemray.client.server_address import ServerAddress
from gemray.client.sync import Answer, Client

__all__ = [
    "Answer",
    "AsyncAnswer",
    "AsyncClient",
    "Cancelled",
    "Client",
    "ClientClosed",
    "ClientError",
    "DeadlinePassed",
    "InvalidOption",
    "RequestFailed",
    "RequestRefused",
    "Retry",
    "ServerAddress",
    "ServerBusy",
    "ServerUnreachable",
    "answers_of",
]
