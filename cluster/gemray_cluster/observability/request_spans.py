"""A span for each request, with its queue, prefill and decoding below it: OpenTelemetry's names, sent over OTLP.

Needs the extra ``tracing``. Names and attributes are those of OpenTelemetry's semantic conventions for generative AI
(https://github.com/open-telemetry/semantic-conventions-genai). The spans are made when a request has ended, from the
times that were taken anyway, so following it costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc

from gemray_cluster.observability.phases import Phase
from gemray_cluster.observability.request_trace import RequestTrace
from gemray_workers.errors import GemrayError, InvalidField

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue

PROVIDER = "gemray"
_NANOSECONDS = 1e9
_MAX_INTEGER = 2**63 - 1
"""Largest value of an attribute; seeds go further."""
_SCHEMES = ("http://", "https://")


class RequestSpans:
    """Turns the traces of ended requests into spans."""

    def __init__(
        self,
        provider: TracerProvider,
        model_name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Spans go to `provider`, which this closes.

        Args:
            provider: samples and exports.
            model_name: what clients call the model.
            clock: the one of the traces, in seconds.
            wall_ns: nanoseconds since 1970.
        """
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("gemray")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._clock = clock
        self._wall_ns = wall_ns

    def ended(self, trace: RequestTrace, status: grpc.StatusCode, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Export a request that has just ended; `metadata` is its call's, in which a ``traceparent`` may be."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        # Ended now: what lies before is as long ago as the clock says.
        now, now_ns = self._clock(), self._wall_ns()

        def at(then: float) -> int:
            return now_ns - round((now - then) * _NANOSECONDS)

        span = self._tracer.start_span(
            f"{trace.operation} {self._model_name}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=at(trace.arrival),
            attributes=_attributes(trace, status, self._model_name),
        )
        if status is not grpc.StatusCode.OK:
            span.set_status(Status(StatusCode.ERROR))
        if span.is_recording():
            for phase in Phase:
                times = trace.phases.span(phase)
                if times is not None:
                    begin, end = map(at, times)
                    child = self._tracer.start_span(phase.value, context=set_span_in_context(span), start_time=begin)
                    child.end(end)
        span.end(now_ns)

    def close(self) -> None:
        """Send what is left. Waits for the collector, as long as the exporter does."""
        self._provider.shutdown()


def _attributes(trace: RequestTrace, status: grpc.StatusCode, model_name: str) -> Mapping[str, AttributeValue]:
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.stream": trace.rpc.endswith("Stream"),
        "gen_ai.response.id": trace.request_id or None,
        "gen_ai.response.finish_reasons": (trace.finish,) if trace.finish else None,
        "gen_ai.response.time_to_first_chunk": trace.first_token_s,
        "gen_ai.usage.output_tokens": trace.completion_tokens,
        "rpc.system": "grpc",
        "rpc.method": trace.rpc,
        "rpc.grpc.status_code": status.value[0],
        "error.type": None if status is grpc.StatusCode.OK else status.name,
    }
    submit = trace.submit
    if submit is not None:
        params = submit.params
        attributes |= {
            "gen_ai.usage.input_tokens": len(submit.prompt_ids),
            "gen_ai.usage.cache_read.input_tokens": trace.phases.cached_tokens,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_k": float(params.top_k),
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.seed": params.seed if params.seed <= _MAX_INTEGER else None,
        }
    return {name: value for name, value in attributes.items() if value is not None}


def check_endpoint(endpoint: str) -> None:
    """Raise InvalidField for what is no address of a collector."""
    if not endpoint.startswith(_SCHEMES) or not endpoint.partition("://")[2].strip("/"):
        raise InvalidField("otlp_traces_endpoint", endpoint, "http://HOST:PORT or https://HOST:PORT of a collector")


def spans_to(endpoint: str, model_name: str) -> RequestSpans:
    """Spans that go to a collector by OTLP over gRPC, in batches.

    The variables of OpenTelemetry hold: OTEL_SERVICE_NAME (default gemray), OTEL_RESOURCE_ATTRIBUTES,
    OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and the like.

    Raises:
        InvalidField: `endpoint` is none.
        GemrayError: the extra ``tracing`` is not installed.
    """
    check_endpoint(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise GemrayError(
            f"otlp_traces_endpoint needs OpenTelemetry: install 'gemray[tracing]' ({error.name} is missing)"
        ) from error
    # The detector again: what is named here would win over the user's variables.
    resource = Resource.create({"service.name": PROVIDER}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://")))
    )
    return RequestSpans(provider, model_name)
