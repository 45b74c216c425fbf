"""Requests as bytes: what is no message, or has more fields than any honest one, is refused before it is built.

gRPC parses a request before a handler sees it, holding up every other call meanwhile, and ends what it cannot parse
with INTERNAL. Eight million empty messages fit into 16 MiB, and take a second and 400 MB to build.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from gemray_cluster.server.status import Context, errors_as_statuses
from gemray_workers.errors import InvalidField, Summary

MAX_FIELDS = 300_000
"""Most fields of a request, its lists and messages included: more than a bias for each id of the largest vocabulary."""
MAX_MESSAGES = 10_000
"""Most fields that hold messages, which cost most to build; more than a chat may have."""
LEAST_FIELD_BYTES = 2
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Unreadable:
    """Bytes that were not made a message, and why."""

    error: InvalidField


def read_message(data: bytes, kind: type[Message]) -> Message | Unreadable:
    """A request, or why it is none."""
    try:
        if len(data) >= MAX_MESSAGES * LEAST_FIELD_BYTES:  # fewer bytes cannot hold too many
            count_fields(data, kind.DESCRIPTOR)
        return kind.FromString(data)
    except InvalidField as error:
        return Unreadable(error)
    except DecodeError as error:
        name = kind.DESCRIPTOR.full_name
        return Unreadable(InvalidField("request", Summary(f"{len(data)} bytes"), f"a {name} message ({error})"))


def count_fields(data: bytes, descriptor: Any) -> int:
    """Fields of a message and of those in it, map entries and packed lists counting once.

    Raises InvalidField for more than MAX_FIELDS, and DecodeError for bytes that cannot be told apart into fields.
    """
    count = num_messages = 0
    open_messages = [(0, len(data), descriptor)]
    while open_messages:
        at, stop, of = open_messages.pop()
        while at < stop:
            count += 1
            if count > MAX_FIELDS:
                raise InvalidField(
                    "request", Summary(f"more than {MAX_FIELDS} fields"), f"at most {MAX_FIELDS}, lists packed"
                )
            tag, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at, stop)
            if tag & 7 == _LENGTH:
                length, at = (data[at], at + 1) if at < stop and data[at] < 128 else _varint(data, at, stop)
                inner = _message_type(of, tag >> 3)
                if inner is not None:
                    num_messages += 1
                    if num_messages > MAX_MESSAGES:
                        raise InvalidField(
                            "request",
                            Summary(f"more than {MAX_MESSAGES} messages"),
                            f"at most {MAX_MESSAGES}: of chats, calls and lists of ids, all together",
                        )
                    open_messages.append((at, min(at + length, stop), inner))
                at += length
            elif tag & 7 == _VARINT:
                _, at = _varint(data, at, stop)
            elif tag & 7 in (_FIXED32, _FIXED64):
                at += 4 if tag & 7 == _FIXED32 else 8
            else:
                raise DecodeError(f"wire type {tag & 7} at byte {at}")
    return count


@cache
def _message_type(of: Any, number: int) -> Any | None:
    """Descriptor of the messages in a field, None where it holds something else."""
    field = of.fields_by_number.get(number)
    inner = None if field is None else field.message_type
    return None if inner is None or inner.GetOptions().map_entry else inner


def _varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = shift = 0
    while at < stop and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise DecodeError(f"a number that does not end at byte {at}")


class ReadableRequests(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Reads the requests of some services itself; unreadable ones end as their error says."""

    def __init__(self, *services: ServiceDescriptor) -> None:
        """All of the services' methods take one message."""
        self._kinds = {
            f"/{service.full_name}/{method.name}": message_factory.GetMessageClass(method.input_type)
            for service in services
            for method in service.methods
        }

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The same handler, given messages or telling why there is none."""
        handler: Any = await continuation(handler_call_details)
        kind = self._kinds.get(handler_call_details.method)
        if handler is None or kind is None:
            return handler  # type: ignore[no-any-return]
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def read_first(request: Message | Unreadable, context: Context) -> Any:
            if isinstance(request, Unreadable):
                async with errors_as_statuses(context):
                    raise request.error
            return await behavior(request, context)

        return make(
            read_first,
            request_deserializer=lambda data: read_message(data, kind),
            response_serializer=handler.response_serializer,
        )
