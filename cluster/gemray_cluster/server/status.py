"""Errors as gRPC statuses, with google.rpc details that clients can act on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from gemray_cluster.gang.client import GangUnavailable, NoLongerFits
from gemray_cluster.observability.request_trace import cut
from gemray_cluster.server.errors import AnswerTooLarge, CallCut, ClientStalled, EngineFault, OtherCheckpoint, QueueFull
from gemray_workers.errors import InvalidField

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


RETRY_AFTER_S = 1
STALLED_STATUS_S = 0.5
MAX_ERROR_BYTES = 1024
"""Most bytes of an error's text. It travels as metadata three times, once with three bytes for each that is not ASCII;
a client takes 8 KiB of metadata and replaces the status of a call that brings more."""

CUT = b" [...] "


def bounded(text: str) -> str:
    """A text as UTF-8 can hold it, cut in the middle where it is too long: field and limits stand at the ends."""
    encoded = text.encode("utf-8", errors="backslashreplace")
    if len(encoded) <= MAX_ERROR_BYTES:
        return encoded.decode()
    half = (MAX_ERROR_BYTES - len(CUT)) // 2
    return (encoded[:half] + CUT + encoded[-half:]).decode("utf-8", errors="ignore")


@asynccontextmanager
async def errors_as_statuses(context: Context) -> AsyncIterator[None]:
    """End the call with the status that the raised error stands for. Cancellation passes through."""
    try:
        yield
    except InvalidField as error:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=bounded(error.field), description=bounded(str(error))
        )
        details = error_details_pb2.BadRequest(field_violations=[violation])
        await _abort(context, code_pb2.INVALID_ARGUMENT, str(error), details)
    except OtherCheckpoint as error:
        await _abort(context, code_pb2.FAILED_PRECONDITION, str(error))
    except QueueFull as error:
        await _abort(context, code_pb2.RESOURCE_EXHAUSTED, str(error), _retry_later())
    except (AnswerTooLarge, NoLongerFits) as error:
        await _abort(context, code_pb2.RESOURCE_EXHAUSTED, str(error))
    except ClientStalled as error:
        logger.warning("a stream ends: %s", error)
        # Its status waits behind what the client does not read; nobody here waits with it.
        with suppress(TimeoutError):
            async with asyncio.timeout(STALLED_STATUS_S):
                await _abort(context, code_pb2.DEADLINE_EXCEEDED, str(error))
        raise asyncio.CancelledError from error
    except GangUnavailable as error:
        await _abort(context, code_pb2.UNAVAILABLE, str(error), _retry_later())
    except CallCut as error:
        cut()
        await _abort(context, code_pb2.UNAVAILABLE, str(error), _retry_later())
    except EngineFault as error:
        await _abort(context, code_pb2.INTERNAL, str(error))
    except Exception:
        logger.exception("a request failed")
        await _abort(context, code_pb2.INTERNAL, "internal error; the server's log has the details")


def _retry_later() -> error_details_pb2.RetryInfo:
    return error_details_pb2.RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER_S))


async def _abort(context: Context, code: int, message: str, *details: Message) -> NoReturn:
    packed = [AnyMessage() for _ in details]
    for any_message, detail in zip(packed, details, strict=True):
        any_message.Pack(detail)
    status = rpc_status.to_status(status_pb2.Status(code=code, message=bounded(message), details=packed))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")
