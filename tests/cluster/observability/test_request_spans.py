"""Spans of requests: names, parents, times, attributes; exported over OTLP, and nothing loaded where they are off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.observability.metrics import RequestMetrics
from gemray_cluster.observability.request_spans import RequestSpans, spans_to
from gemray_cluster.observability.request_trace import RequestTrace, TraceInterceptor
from gemray_workers.errors import GemrayError, InvalidField
from gemray_workers.messages import SequenceDelta, Submit
from gemray_workers.sampling.params import SamplingParams
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import serving
from support.cluster.text import tiny_tokenizer
from support.waiting import HANG_S

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NOW_S = 100.0
NOW_NS = 1_800_000_000 * 10**9


class Sink:
    """Spans that were exported, and what makes them."""

    def __init__(self, **clocks: Any) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = RequestSpans(provider, "gemma", **clocks)

    @property
    def exported(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}


@pytest.fixture
def sink() -> Iterator[Sink]:
    made = Sink(clock=lambda: NOW_S, wall_ns=lambda: NOW_NS)
    yield made
    made.spans.close()


def ended_trace(*, seed: int = 5) -> RequestTrace:
    """A request that came 10 s ago, waited 1 s of 2 for its slot, and had its tokens 4 s and 9 s after it came."""
    times = iter([NOW_S - 10, NOW_S - 9, NOW_S - 6, NOW_S - 1, NOW_S])
    trace = RequestTrace("GenerateStream", RequestMetrics(CollectorRegistry()), clock=lambda: next(times))
    params = SamplingParams(temperature=0.5, top_k=64, top_p=0.9, min_p=0.0, seed=seed, max_tokens=9)
    trace.request_id = "mine"
    trace.submitted(Submit(request_id="mine", prompt_ids=[1, 2, 3], params=params))
    trace.delta(SequenceDelta(request_id="mine", token_ids=[7], queue_seconds=1.0, cached_tokens=2))
    trace.delta(SequenceDelta(request_id="mine", token_ids=[8, 9], finish="length"))
    trace.ended(grpc.StatusCode.OK)
    return trace


def traceparent(flags: str) -> Sequence[tuple[str, str]]:
    return (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-{flags}"),)


def test_a_request_and_its_phases(sink: Sink) -> None:
    sink.spans.ended(ended_trace(), grpc.StatusCode.OK, traceparent("01"))
    spans = sink.exported
    request = spans.pop("text_completion gemma")
    assert request.kind is SpanKind.SERVER
    assert request.parent is not None
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    seconds = {name: _seconds(span) for name, span in {"request": request, **spans}.items()}
    assert seconds == {"request": (-10, 0), "queue": (-9, -8), "prefill": (-8, -6), "decode": (-6, -1)}
    for span in spans.values():
        assert span.parent == request.context
    assert dict(request.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "gemray",
        "gen_ai.request.model": "gemma",
        "gen_ai.response.model": "gemma",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 64.0,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.seed": 5,
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": 4.0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "rpc.system": "grpc",
        "rpc.method": "GenerateStream",
        "rpc.grpc.status_code": 0,
    }


def test_a_seed_that_is_no_attribute_is_left_out(sink: Sink) -> None:
    sink.spans.ended(ended_trace(seed=2**64 - 1), grpc.StatusCode.OK, ())
    request = sink.exported["text_completion gemma"]
    assert request.parent is None
    assert "gen_ai.request.seed" not in (request.attributes or {})


def test_a_client_that_does_not_sample_decides(sink: Sink) -> None:
    sink.spans.ended(ended_trace(), grpc.StatusCode.OK, traceparent("00"))
    assert sink.exported == {}


async def test_calls_to_a_server(tmp_path: Path) -> None:
    sink = Sink()
    interceptor = TraceInterceptor(RequestMetrics(CollectorRegistry()), sink.spans)
    async with serving(tiny_tokenizer(tmp_path), FakeGang(Script([180, 106])), interceptors=[interceptor]) as server:
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")])
        await server.stub.Generate(pb.GenerateRequest(chat=chat, request_id="one"), metadata=traceparent("01"))
        with pytest.raises(grpc.aio.AioRpcError):
            await server.stub.Generate(pb.GenerateRequest(text="Hi", sampling=pb.SamplingParameters(top_p=7)))
    good, bad = sink.exported["chat gemma"], sink.exported["text_completion gemma"]
    assert good.context is not None
    assert f"{good.context.trace_id:032x}" == TRACE_ID
    assert (good.attributes or {})["gen_ai.response.id"] == "one"
    assert good.status.status_code is StatusCode.UNSET
    assert bad.status.status_code is StatusCode.ERROR
    assert (bad.attributes or {})["error.type"] == "INVALID_ARGUMENT"
    assert "gen_ai.usage.input_tokens" not in (bad.attributes or {}), "it never got to the engine"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.received: Queue[Any] = Queue()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.received.put(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        spans = spans_to(f"http://127.0.0.1:{port}", "gemma")
        spans.ended(ended_trace(), grpc.StatusCode.OK, ())
        spans.close()  # sends what is left
        (of_server,) = collector.received.get(timeout=HANG_S).resource_spans
    finally:
        server.stop(0)
    resource = {attribute.key: attribute.value.string_value for attribute in of_server.resource.attributes}
    assert (resource["service.name"], resource["deployment.environment"]) == ("gemray", "test")
    names = {span.name for scope in of_server.scope_spans for span in scope.spans}
    assert names == {"text_completion gemma", "queue", "prefill", "decode"}


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://", "grpc://collector:4317", ""])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidField, match=r"otlp_traces_endpoint = .*http://HOST:PORT"):
        spans_to(endpoint, "gemma")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(GemrayError, match=r"gemray\[tracing\]"):
        spans_to("http://127.0.0.1:4317", "gemma")


def test_nothing_is_loaded_where_it_is_off() -> None:
    probe = (
        "import sys; import gemray_cluster.observability.request_spans\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=HANG_S)


def _seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.start_time - NOW_NS) / 1e9, (span.end_time - NOW_NS) / 1e9
