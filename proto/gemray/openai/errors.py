"""Errors as OpenAI's API tells them: an HTTP status, and a body whose `param` names the field."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import grpc

from gemray.client import ClientError
from gemray.openai.field_names import http_name, http_words

logger = logging.getLogger(__name__)

INVALID = "invalid_request_error"

_STATUSES: dict[grpc.StatusCode, tuple[int, str, str | None]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, INVALID, None),
    grpc.StatusCode.UNAUTHENTICATED: (401, INVALID, "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: (403, INVALID, None),
    grpc.StatusCode.NOT_FOUND: (404, INVALID, None),
    grpc.StatusCode.FAILED_PRECONDITION: (412, INVALID, "checkpoint_changed"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "server_error", None),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error", "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "server_error", "timeout"),
}
"""HTTP status, OpenAI's type and code; of others 500."""

_TOO_LONG = (" tokens, but the prompt may have at most ", " bytes, prompt and output together")
"""What the server says of a prompt that its tokens, or its bytes alone, make too long."""

MAX_SHOWN_CHARS = 80
MAX_PARAM_CHARS = 200
MAX_MESSAGE_CHARS = 1500
"""Characters of an error's message, as a request may hold names and values of megabytes."""


class HttpError(Exception):
    """An answer that tells of an error.

    Attributes:
        status: of HTTP.
        message: one sentence.
        kind: OpenAI's `type`.
        param: the field that is wrong; None for other errors.
        code: OpenAI's `code`; None where it has none.
        retry_after_s: seconds after which to try again; None where that would not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.status, self.kind, self.code, self.retry_after_s = status, kind, code, retry_after_s
        self.message = bounded(message, MAX_MESSAGE_CHARS)
        self.param = None if param is None else bounded(param, MAX_PARAM_CHARS)
        super().__init__(self.message)

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers beside the body."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(math.ceil(self.retry_after_s))}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


class ClientGone(Exception):
    """The HTTP client has closed its connection: nobody is left to answer."""


def bounded(text: str, max_chars: int) -> str:
    """A text that UTF-8 can hold, and that is cut where it is too long."""
    cut = text if len(text) <= max_chars else f"{text[:max_chars]}..."
    return cut.encode("utf-8", errors="backslashreplace").decode()


def bad_field(param: str, value: object, allowed: str) -> HttpError:
    """A field with a value that is not allowed; `allowed` says in words what would be."""
    return HttpError(400, f"{param} = {shown(value)} is not allowed: {allowed}", param=param)


def shown(value: object) -> str:
    """A value of a request, as JSON, cut where it is long."""
    # A cut of the value itself, so that a megabyte is not written out for the sake of its beginning.
    whole = value[:MAX_SHOWN_CHARS] if isinstance(value, str | list) else value
    text = json.dumps(whole, ensure_ascii=True)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def http_error_of(error: ClientError, *, hint_401: str = "") -> HttpError:
    """What a failed call of the gemray server means; `hint_401` is said to those who are not let in."""
    status, kind, code = 500, "server_error", None
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # Of the two things that can be exhausted, only places are free again after a while.
        too_large = error.retry_after_s is None
        status, kind, code = (413, INVALID, "too_large") if too_large else (429, "requests", "rate_limit_exceeded")
    elif error.code is not None:
        status, kind, code = _STATUSES.get(error.code, (status, kind, code))
    message, param = error.details or str(error), None
    if error.code is grpc.StatusCode.UNAVAILABLE and error.retry_after_s is None:
        # gRPC says so and not the server, which would tell when to try again; where it is, is nobody's business.
        logger.warning("%s", error)
        message = "the model's server cannot be reached"
    if error.field is not None:
        param = http_name(error.field)
        message = message.replace(error.field, param, 1)
        message = http_words(message) if param == "tool_choice" else message
        if any(words in message for words in _TOO_LONG):
            code = "context_length_exceeded"
    return HttpError(
        status,
        message + (hint_401 if status == 401 else ""),
        kind=kind,
        param=param,
        code=code,
        retry_after_s=error.retry_after_s or (1.0 if status == 503 else None),
    )
