"""Errors of a client, each told in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

STATUS_DETAILS = "grpc-status-details-bin"


class ClientError(Exception):
    """Base of every error that a client raises on purpose.

    Attributes:
        code: status of the call; None when no call was made.
        details: what the server says of it, alone; None when no call was made.
        field: name of the field that the server, or the client, does not take; None for other errors.
        retry_after_s: seconds after which the server asks to be tried again; None when it does not.
    """

    code: grpc.StatusCode | None = None
    details: str | None = None
    field: str | None = None
    retry_after_s: float | None = None


class InvalidOption(ClientError, ValueError):
    """An option of the client has a value that is not allowed.

    Attributes:
        field: the option's name.
        value: the value received.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field: str = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} = {value!r} is not allowed: {allowed}")


class ServerUnreachable(ClientError):
    """No server answers, or it does not serve now."""


class ServerBusy(ServerUnreachable):
    """The server holds as many requests as it may, or an answer is larger than a message may be."""


class DeadlinePassed(ServerUnreachable):
    """The call's time is over."""


class RequestRefused(ClientError):
    """The server says that the request is wrong or not allowed."""


class RequestFailed(ClientError):
    """The server took the request and could not finish it."""


class ClientClosed(ClientError):
    """The client was closed before the call."""


class Cancelled(ClientError):
    """The client has cancelled the call."""


_KINDS: Mapping[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.UNAVAILABLE: ServerUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ServerBusy,
    grpc.StatusCode.INVALID_ARGUMENT: RequestRefused,
    grpc.StatusCode.UNAUTHENTICATED: RequestRefused,
    grpc.StatusCode.PERMISSION_DENIED: RequestRefused,
    grpc.StatusCode.NOT_FOUND: RequestRefused,
    grpc.StatusCode.FAILED_PRECONDITION: RequestRefused,
    grpc.StatusCode.UNIMPLEMENTED: RequestRefused,
}

_CHANNEL_CLOSED = "Channel closed!"
"""What gRPC says of a call whose channel another thread has closed."""
_WENT_AWAY = "the server is going away, and has not taken the call or not finished it"
_TIME_IS_OVER = "Deadline Exceeded"
"""What gRPC itself says of it, and little else; a server that ends a call for its time says why."""
_HINTS: Mapping[str, str] = {
    "WRONG_VERSION_NUMBER": "the server has no TLS, so call it without",
    "CERTIFICATE_VERIFY_FAILED": "tls_ca_file names the authority of a certificate that this system does not trust",
    "Hostname Verification Check failed": "the address is not one that the server's certificate is for",
    "Socket closed": "the server may want TLS",
    "Connection reset by peer": "the server may want TLS",
}
"""What to do about what gRPC says of connections that fail."""
_NO_CONNECTION = "failed to connect"
"""So begins what gRPC says of them; a connection that breaks later is told in other words."""


def error_of(address: str, error: Any) -> ClientError:
    """What a failed call (grpc.RpcError or grpc.aio.AioRpcError) of the server at `address` means.

    For calls that the client has not cancelled. CANCELLED then is UNAVAILABLE: gRPC's core so ends a call that arrives
    just when the server tells its connection to go away (GOAWAY), and which it has not taken.
    """
    code = error.code()
    details = error.details()
    if code is grpc.StatusCode.CANCELLED:
        if details == _CHANNEL_CLOSED:
            return ClientClosed(f"{address}: the client is closed")
        code, details = grpc.StatusCode.UNAVAILABLE, _WENT_AWAY
    if details is not None and _TIME_IS_OVER in details:
        details = "the call's time was over before its answer was whole"
    told = _KINDS.get(code, RequestFailed)(f"{address}: {code.name}: {details}{_hint(details)}")
    told.code, told.details = code, details
    for detail in _details(error):
        violations, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(violations) and violations.field_violations:
            told.field = violations.field_violations[0].field
        elif detail.Unpack(retry):
            told.retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return told


def _hint(details: str | None) -> str:
    if details is None or not details.startswith(_NO_CONNECTION):
        return ""
    return next((f"; {hint}" for words, hint in _HINTS.items() if words in details), "")


def _details(error: Any) -> Any:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS:
            return status_pb2.Status.FromString(value).details
    return ()
