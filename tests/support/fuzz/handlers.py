"""Requests on the handlers of a server without a port: what each ended with, and whether that may be."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from typing_extensions import override

from gemray_cluster.server.config import ServerConfig
from gemray_cluster.server.live_calls import LiveCalls
from gemray_cluster.server.request_limiter import RequestLimiter
from gemray_cluster.server.requests import RequestReader
from gemray_cluster.server.service import SERVICE, GenerationService
from gemray_cluster.server.status import errors_as_statuses
from gemray_cluster.server.text_work import Result, TextWork
from gemray_cluster.server.wire import Unreadable, read_message
from gemray_workers.embedded import embedded_path
from support.cluster.fake_gang import FakeGang, gang_info
from support.fuzz.corpus import corpus
from support.fuzz.mutate import mutated, mutated_bytes

HANG_S = 120.0
MAX_TOKENS_OF_MODEL = 256
ALLOWED = {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
"""RESOURCE_EXHAUSTED: an answer that is too large for one message."""


class Ended(Exception):
    """The handler has ended its call with a status."""


class RecordingContext:
    """What a handler needs of a call."""

    def __init__(self) -> None:
        self.code = "OK"
        self.details = ""
        self.trailing: Any = ()
        self.written: list[Message] = []

    def peer(self) -> str:
        return "fuzz"

    async def send_initial_metadata(self, metadata: Any) -> None:
        for name, value in metadata:
            assert name.isascii(), name
            assert value.isprintable(), value

    async def write(self, message: Message) -> None:
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.code, self.details, self.trailing = code.name, details, trailing_metadata
        raise Ended


@dataclass
class Tally:
    """What a sweep found."""

    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By call and status."""
    fields: Counter[str] = field(default_factory=Counter)
    """Refused fields, their indices left out."""
    faults: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    @property
    def count(self) -> int:
        return self.ended.total()

    def merge(self, other: Tally) -> None:
        self.ended += other.ended
        self.fields += other.fields
        self.faults += other.faults
        self.slowest = max(self.slowest, other.slowest)


class InlineTextWork(TextWork):
    """Does the work at once: a sweep makes one call after the other."""

    @override
    async def run(self, caller: str, num_bytes: int, work: Callable[[], Result]) -> Result:
        return work()

    @override
    async def compile(self, caller: str, work: Callable[[], Result]) -> Result:
        return work()


class Handlers:
    """The handlers over a gang that makes tokens up."""

    def __init__(self) -> None:
        directory = str(embedded_path("gemray-tiny"))
        self._reader = RequestReader.from_directory(directory)
        self._gang = FakeGang(
            gang_info=gang_info(vocab_size=self._reader.vocab_size, max_model_len=MAX_TOKENS_OF_MODEL)
        )
        self._gang.script.group_sizes = (3, 1, 2)
        self.limiter = RequestLimiter(8)
        self._text_work = InlineTextWork()
        self._service = GenerationService(
            self._gang, self._reader, self.limiter, LiveCalls(), self._text_work, ServerConfig()
        )
        self._kinds = {method.name: message_factory.GetMessageClass(method.input_type) for method in SERVICE.methods}
        self._raised = _LastError()
        logging.getLogger("gemray_cluster.server.status").addHandler(self._raised)

    async def call(self, method: str, data: bytes) -> tuple[RecordingContext, Any]:
        """A call with these bytes, as the server's interceptors would pass them on; the context and the answer."""
        context: Any = RecordingContext()
        request = read_message(data, self._kinds[method])
        answer = None
        try:
            if isinstance(request, Unreadable):
                async with errors_as_statuses(context):
                    raise request.error
            answer = await getattr(self._service, method)(request, context)
        except Ended:
            pass
        return context, answer

    async def judge(self, method: str, data: bytes, tally: Tally) -> None:
        """Make the call and count how it ended; what may not be is a fault."""
        began = time.perf_counter()
        self._gang.submitted.clear()
        self._gang.cancelled.clear()
        fault = ""
        try:
            async with asyncio.timeout(HANG_S):
                context, answer = await self.call(method, data)
            code = context.code
            fault = self._fault_of(method, context, answer, tally)
        except TimeoutError:
            code, fault = "HANG", f"no end within {HANG_S:g} s"
        except Exception as error:
            code, fault = "RAISED", f"{type(error).__name__}: {error}"
        tally.ended[method, code] += 1
        if fault:
            tally.faults.append(f"{method} {data.hex()}: {fault}")
        tally.slowest = max(tally.slowest, (time.perf_counter() - began, f"{method} {data[:2000].hex()}"))

    def _fault_of(self, method: str, context: RecordingContext, answer: Any, tally: Tally) -> str:
        if context.code not in ALLOWED:
            return f"{context.code}: {context.details} {self._raised.text}"
        if self.limiter.active or self._gang.num_active:
            return f"{self.limiter.active} places and {self._gang.num_active} requests are not given back"
        if context.code == "INVALID_ARGUMENT":
            name = _refused_field(context)
            if not name:
                return f"no field is named: {context.details}"
            tally.fields["".join(part.partition("[")[0] + "." for part in name.split("."))[:-1]] += 1
        elif context.code == "OK" and method == "GenerateStream":
            events: list[Any] = context.written
            if [e.WhichOneof("event") for e in events][-1:] != ["final"]:
                return "a stream without a final message ended OK"
        elif context.code == "OK" and not isinstance(answer, Message):
            return "no answer"
        return ""

    def close(self) -> None:
        self._text_work.close()
        logging.getLogger("gemray_cluster.server.status").removeHandler(self._raised)


class _LastError(logging.Handler):
    """Keeps the trace of what a handler raised."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = logging.Formatter().format(record)


def _refused_field(context: RecordingContext) -> str:
    details = dict(context.trailing)["grpc-status-details-bin"]
    told = error_details_pb2.BadRequest()
    status_pb2.Status.FromString(details).details[0].Unpack(told)
    return told.field_violations[0].field


async def sweep(handlers: Handlers, seed: int, count: int) -> Tally:
    """`count` requests: of ten, six mutated by their descriptors, three by their bytes, one of bytes at random."""
    random = Random(seed)
    requests = corpus()
    serialized = [request.SerializeToString() for _, request in requests]
    tally = Tally()
    for method, request in requests:
        await handlers.judge(method, request.SerializeToString(), tally)
    grown = list(requests)
    while tally.count < count:
        index = random.randrange(len(grown))
        method, request = grown[index]
        draw = random.random()
        if draw < 0.6:
            changed = mutated(request, random)
            data = changed.SerializeToString()
            if draw < 0.1:  # changes upon changes go further from what is right
                grown[index] = (method, changed) if index >= len(requests) else grown[index]
                if len(grown) < 4 * len(requests):
                    grown.append((method, changed))
        elif draw < 0.9:
            data = mutated_bytes(request.SerializeToString(), serialized, random)
        else:
            data = random.randbytes(random.choice((0, 1, 3, 10, 100)))
        await handlers.judge(method, data, tally)
    return tally
