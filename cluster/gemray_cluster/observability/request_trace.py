"""Follows each generation request from arrival to end: its metrics and its one log line.

`TraceInterceptor` sees a call begin and end with its status; the service tells what happens between (`identify`,
`submitted`, `advanced`, `completed`, `cut`). They meet in a context variable, which follows the call's task.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from gemray_cluster.observability.json_lines import REQUEST
from gemray_cluster.observability.metrics import RequestMetrics
from gemray_cluster.observability.phases import Phase, Phases
from gemray_workers.messages import SequenceDelta, SpeculationCounters, Submit

logger = logging.getLogger("gemray.request")

GENERATION_METHODS = frozenset({"Generate", "GenerateStream"})
"""Traced methods, of any service on the port."""

ROUNDING = 0.02
"""Part of a deadline by which gRPC rounds it up when it travels, at most: the client gives up so much earlier."""

_OUTCOME_OF_STATUS = {
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.FAILED_PRECONDITION: "invalid",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "rejected",
    grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
}
_OUTCOME_OF_OTHER_STATUS = "error"
_OUTCOME_OF_CUT = "cut"
"""Whatever the status: a server that is going may not get to send one."""

_current: ContextVar[RequestTrace | None] = ContextVar("gemray_request_trace", default=None)


def identify(request_id: str) -> None:
    """Name the current call's request, by the client's id or one made for it."""
    trace = _current.get()
    if trace is not None:
        trace.request_id = request_id


def submitted(submit: Submit) -> None:
    """Record that the current call's request, or one of its answers, goes to the engine."""
    trace = _current.get()
    if trace is not None:
        trace.submitted(submit)


def advanced(delta: SequenceDelta, answer: int) -> None:
    """Record what the engine gave an answer of the current call: tokens, an end, or both."""
    trace = _current.get()
    if trace is not None:
        trace.delta(delta, answer)


def completed(reason: str, num_tokens: int, speculation: SpeculationCounters | None) -> None:
    """Record what the current call gave its client; a stop string may have cut what the engine gave."""
    trace = _current.get()
    if trace is not None:
        trace.finish = reason
        trace.completion_tokens = num_tokens
        trace.speculation = speculation


def cut() -> None:
    """Record that the server ends the current call because it ends itself."""
    trace = _current.get()
    if trace is not None:
        trace.is_cut = True


@dataclass
class RequestTrace:
    """What is known of one call."""

    rpc: str
    metrics: RequestMetrics
    clock: Callable[[], float] = time.monotonic
    request_id: str = ""
    """As the client knows it."""
    engine_id: str = ""
    """As the engine knows it: clients may reuse theirs."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    finish: str | None = None
    """Why the output ended, once it has."""
    speculation: SpeculationCounters | None = None
    phases: Phases = field(default_factory=Phases)
    is_cut: bool = False
    """Whether the server ended it because it ended itself."""
    operation: str = "text_completion"
    """What was asked for, as OpenTelemetry calls it; ``chat`` is the other one."""
    submit: Submit | None = None
    """The request as the engine got it, if it did."""
    _arrival: float = field(init=False)
    _newest: dict[int, float] = field(init=False, default_factory=dict)
    """When the newest token of each answer came."""
    _submitted: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._arrival = self.clock()
        self.metrics.in_flight.inc()

    @property
    def arrival(self) -> float:
        """When the call came, by `clock`."""
        return self._arrival

    def submitted(self, submit: Submit) -> None:
        """The request goes to the engine; of several answers the first one counts."""
        if self._submitted:
            return
        self._submitted = True
        self.submit = submit
        self.engine_id = submit.request_id
        self.prompt_tokens = len(submit.prompt_ids)
        self.metrics.prompt_tokens.observe(self.prompt_tokens)
        self.phases.submit(self.clock())

    def delta(self, delta: SequenceDelta, answer: int = 0) -> None:
        """The engine gave an answer tokens, an end, or both."""
        now = self.clock()
        for phase in self.phases.advance(delta, now):
            self.metrics.phase_ended(phase, self.phases)
        num_later = len(delta.token_ids)
        if delta.token_ids and self.first_token_s is None:
            self.first_token_s = now - self._arrival
            self.metrics.first_token.observe(self.first_token_s)
        if answer not in self._newest:
            num_later = 0  # tokens that came together with the first one took no time of their own
        for _ in range(num_later):
            self.metrics.inter_token.observe((now - self._newest[answer]) / num_later)
        if delta.token_ids:
            self._newest[answer] = now
        self.completion_tokens += len(delta.token_ids)
        self.finish = delta.finish or self.finish
        self.speculation = delta.speculation or self.speculation

    def ended(self, status: grpc.StatusCode) -> None:
        """The call ended with `status`: count it and write its line."""
        outcome = self._outcome(status)
        duration_s = self.clock() - self._arrival
        self.metrics.in_flight.dec()
        self.metrics.requests.labels(outcome).inc()
        self.metrics.duration.observe(duration_s)
        if self._submitted:
            self.metrics.completion_tokens.observe(self.completion_tokens)
        self.metrics.phase_ended(Phase.DECODE, self.phases)
        fields: dict[str, object] = {
            "id": self.request_id,
            "rpc": self.rpc,
            "outcome": outcome,
            "status": status.name,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "duration_ms": round(duration_s * 1e3, 1),
        }
        if self.engine_id not in ("", self.request_id):
            fields["engine_id"] = self.engine_id
        if self.phases.queue_s is not None:
            fields["queue_ms"] = round(self.phases.queue_s * 1e3, 1)
        if self.first_token_s is not None:
            fields["first_token_ms"] = round(self.first_token_s * 1e3, 1)
        if self.speculation is not None and self.speculation.rounds:
            fields["drafted"] = self.speculation.drafted
            fields["accepted"] = self.speculation.accepted
        logger.info("request %s", key_values(fields), extra={REQUEST: fields})

    def _outcome(self, status: grpc.StatusCode) -> str:
        if self.is_cut:
            return _OUTCOME_OF_CUT
        if status is not grpc.StatusCode.OK:
            return _OUTCOME_OF_STATUS.get(status, _OUTCOME_OF_OTHER_STATUS)
        return self.finish or _OUTCOME_OF_OTHER_STATUS


def key_values(fields: dict[str, object]) -> str:
    """``a=1 b=two c="with space"``: one line whatever a client put into its id."""
    return " ".join(f"{key}={_quoted(str(value))}" for key, value in fields.items())


def _quoted(value: str) -> str:
    plain = value and value.isprintable() and not set(value) & set(' "=\\')
    return value if plain else json.dumps(value)


class TraceListener(Protocol):
    """Who wants to know of calls that have ended."""

    def ended(self, trace: RequestTrace, status: grpc.StatusCode, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """A call ended; `metadata` came with it."""
        ...


class TraceInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Opens a trace for each generation call and ends it with the call's status. Put it first."""

    def __init__(self, metrics: RequestMetrics, listener: TraceListener | None = None) -> None:
        """`listener` is told of each call that has ended."""
        self._metrics = metrics
        self._listener = listener

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap the handlers of generation methods."""
        handler = await continuation(handler_call_details)
        rpc = handler_call_details.method.rsplit("/", 1)[-1]
        if handler is None or rpc not in GENERATION_METHODS:
            return handler
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(rpc, handler.unary_stream), handler.request_deserializer, handler.response_serializer
            )
        assert handler.unary_unary is not None, "generation methods take one message"
        return grpc.unary_unary_rpc_method_handler(
            self._unary(rpc, handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )

    def _open(self, rpc: str, request: Any) -> RequestTrace:
        trace = RequestTrace(rpc, self._metrics)
        if isinstance(request, Message) and request.WhichOneof("input") == "chat":
            trace.operation = "chat"
        _current.set(trace)
        return trace

    def _end(self, trace: RequestTrace, status: grpc.StatusCode, context: Any) -> None:
        trace.ended(status)
        if self._listener is not None:
            self._listener.ended(trace, status, context.invocation_metadata() or ())

    def _unary(self, rpc: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def traced(request: Any, context: Any) -> Any:
            trace, allowed_s = self._open(rpc, request), context.time_remaining()
            try:
                response = await behaviour(request, context)
            except BaseException as error:
                self._end(trace, _status(error, context, allowed_s), context)
                raise
            self._end(trace, _code(context) or grpc.StatusCode.OK, context)
            return response

        return traced

    def _stream(self, rpc: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def traced(request: Any, context: Any) -> None:
            trace, allowed_s = self._open(rpc, request), context.time_remaining()
            try:
                answer = behaviour(request, context)
                # A handler either is an async generator or writes to its context.
                if isinstance(answer, AsyncGenerator):
                    async with aclosing(answer) as responses:
                        async for response in responses:
                            await context.write(response)
                else:
                    await answer
            except BaseException as error:
                self._end(trace, _status(error, context, allowed_s), context)
                raise
            self._end(trace, _code(context) or grpc.StatusCode.OK, context)

        return traced


def _status(error: BaseException, context: Any, allowed_s: float | None) -> grpc.StatusCode:
    if isinstance(error, asyncio.CancelledError):
        remaining = context.time_remaining()
        late = remaining is not None and allowed_s is not None and remaining <= ROUNDING * allowed_s
        return grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
    return _code(context) or grpc.StatusCode.UNKNOWN


def _code(context: Any) -> grpc.StatusCode | None:
    """The status that the handler set, if it set one."""
    code = context.code()
    return next((status for status in grpc.StatusCode if code in (status, status.value[0])), None) if code else None
