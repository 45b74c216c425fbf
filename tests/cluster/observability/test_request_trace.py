"""Each request is counted once, with the outcome that its client saw, and leaves one log line."""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import grpc
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gemray.v1 import generation_pb2 as pb
from gemray_cluster.observability.metrics import OUTCOMES, EngineCollector, MetricsServer, RequestMetrics
from gemray_cluster.observability.request_trace import RequestTrace, TraceInterceptor, key_values
from gemray_cluster.text.output import Ending
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.messages import SequenceDelta, Submit
from gemray_workers.sampling.params import SamplingParams
from support.cluster.deadlines import until_taken
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.serving import Serving, serving
from support.cluster.text import tiny_tokenizer
from support.deployment.commands import DEPLOY_DOC
from support.waiting import HANG_S, eventually

SAMPLING = pb.SamplingParameters(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return tiny_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")))


@dataclass
class Watched:
    """A traced server and its series."""

    serving: Serving
    registry: CollectorRegistry
    url: str

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def outcomes(self) -> dict[str, float]:
        return {
            sample.labels["outcome"]: sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "gemray_request_total" and sample.value
        }

    async def scrape(self) -> str:
        def read() -> str:
            with urllib.request.urlopen(self.url, timeout=HANG_S) as answer:
                return str(answer.read().decode())

        return await asyncio.to_thread(read)


@asynccontextmanager
async def watched(tokenizer: ChatTokenizer, script: Script, **config: Any) -> AsyncIterator[Watched]:
    registry = CollectorRegistry()
    gang = FakeGang(script)
    registry.register(EngineCollector(gang))
    interceptor = TraceInterceptor(RequestMetrics(registry))
    endpoint = MetricsServer(registry, host="127.0.0.1", port=0)
    try:
        async with serving(tokenizer, gang, interceptors=[interceptor], **config) as running:
            yield Watched(running, registry, f"http://127.0.0.1:{endpoint.port}/metrics")
    finally:
        endpoint.close()


def stream_request(**fields: Any) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(text="hello", **{"sampling": SAMPLING, **fields})


async def test_finished_request(tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gemray.request")
    async with watched(tokenizer, Script(group_sizes=(2, 1), delay_s=0.01)) as server:
        await server.serving.stream(stream_request(request_id="one"))
        await eventually(lambda: server.outcomes() == {"length": 1})
        assert server.value("gemray_time_to_first_token_seconds_count") == 1
        # Groups of 2, 1, 2, 1: the second token came with the first, so four have a time of their own.
        assert server.value("gemray_inter_token_latency_seconds_count") == 4
        assert server.value("gemray_inter_token_latency_seconds_sum") > 0.02
        assert server.value("gemray_request_completion_tokens_sum") == 6
        assert server.value("gemray_requests_in_flight") == 0
    (line,) = [record.getMessage() for record in caplog.records if record.name == "gemray.request"]
    assert server.serving.gang.submitted[0].request_id in line
    fields = dict(part.split("=", 1) for part in line.split()[1:])
    assert line.startswith("request id=one ")
    assert (fields["rpc"], fields["outcome"], fields["status"]) == ("GenerateStream", "length", "OK")
    assert fields["completion_tokens"] == "6"
    assert float(fields["first_token_ms"]) <= float(fields["duration_ms"])


async def test_outcomes_are_those_that_clients_see(tokenizer: ChatTokenizer) -> None:
    async with watched(tokenizer, Script(), max_live_requests=2) as server:
        stub, gang = server.serving.stub, server.serving.gang

        async def idle_after(number: int, outcome: str) -> None:
            await eventually(lambda: server.outcomes().get(outcome, 0) >= number)
            await eventually(lambda: server.value("gemray_requests_in_flight") == 0)

        await stub.Generate(pb.GenerateRequest(text="hello", sampling=SAMPLING))
        await idle_after(1, "length")
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(pb.GenerateRequest(text="hello", sampling=pb.SamplingParameters(top_p=7)))
        await idle_after(1, "invalid")
        gang.script = Script(stalls_after=0)

        async def ask(deadline_s: float) -> None:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Generate(pb.GenerateRequest(text="hello", sampling=SAMPLING), timeout=deadline_s)

        await until_taken(gang, ask)
        await idle_after(1, "deadline")
        calls = [stub.GenerateStream(stream_request()) for _ in range(2)]
        await eventually(lambda: server.value("gemray_requests_in_flight") == 2)
        with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
            await stub.Generate(pb.GenerateRequest(text="hello", sampling=SAMPLING))
        for call in calls:
            call.cancel()
        await idle_after(2, "cancelled")
        found = server.outcomes()
        assert found.pop("deadline") >= 1
        assert found == {"length": 1, "invalid": 1, "rejected": 1, "cancelled": 2}


def test_every_outcome_counts_from_0_on() -> None:
    """Prometheus takes a series that appears with 1 for one that never rose, and an alert misses the first errors."""
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)

    def counts() -> dict[str, float]:
        family = next(family for family in registry.collect() if family.name == "gemray_request")
        return {s.labels["outcome"]: s.value for s in family.samples if s.name == "gemray_request_total"}

    assert counts() == dict.fromkeys(OUTCOMES, 0)
    for status in grpc.StatusCode:
        RequestTrace("Generate", metrics).ended(status)
    for reason in get_args(get_type_hints(Ending)["reason"]):
        RequestTrace("Generate", metrics, finish=reason).ended(grpc.StatusCode.OK)
    RequestTrace("Generate", metrics, is_cut=True).ended(grpc.StatusCode.UNAVAILABLE)
    assert set(counts()) == set(OUTCOMES)
    assert min(counts().values()) >= 1
    row = next(line for line in DEPLOY_DOC.read_text().splitlines() if "gemray_request_total{outcome}" in line)
    assert [outcome for outcome in OUTCOMES if f"`{outcome}`" not in row] == []


@pytest.mark.parametrize(
    ("script", "outcome"), [(Script(fault_after=2), "error"), (Script(die_after=2), "unavailable")]
)
async def test_engine_trouble(tokenizer: ChatTokenizer, script: Script, outcome: str) -> None:
    async with watched(tokenizer, script) as server:
        with pytest.raises(grpc.aio.AioRpcError):
            await server.serving.stream(stream_request())
        await eventually(lambda: server.outcomes() == {outcome: 1})


async def test_what_a_drain_cuts_is_an_outcome_of_its_own(
    tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gemray.request")
    async with watched(tokenizer, Script(stalls_after=5), drain_deadline_s=0) as server:
        call = server.serving.stub.GenerateStream(stream_request(sampling={"max_tokens": 240, "ignore_eos": True}))
        await call.read()
        assert await server.serving.server.drain() == 1
        await eventually(lambda: server.outcomes() == {"cut": 1})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "gemray.request"]
    assert "outcome=cut status=UNAVAILABLE" in line


async def test_a_stop_string_is_an_outcome_of_its_own(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("one two three")
    async with watched(tokenizer, Script(token_ids=ids, group_sizes=(len(ids),))) as server:
        sampling = pb.SamplingParameters(max_tokens=len(ids), temperature=0.0, ignore_eos=True, stop=["two"])
        answer = await server.serving.stub.Generate(pb.GenerateRequest(text="hello", sampling=sampling))
        assert answer.completion.finish_reason == pb.FINISH_REASON_STOP_STRING
        await eventually(lambda: server.outcomes() == {"stop_string": 1})
        assert answer.completion.usage.completion_tokens < len(ids)
        counted = server.value("gemray_request_completion_tokens_sum")
        assert counted == answer.completion.usage.completion_tokens, "what the client got, not what the engine gave"


async def test_unauthenticated_calls_are_counted(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    async with watched(tokenizer, Script(), auth_token_file=str(tmp_path / "tokens")) as server:
        with pytest.raises(grpc.aio.AioRpcError):
            await server.serving.stream(stream_request())
        await eventually(lambda: server.outcomes() == {"unauthenticated": 1})


async def test_endpoint_parses_under_load(tokenizer: ChatTokenizer) -> None:
    async with watched(tokenizer, Script(group_sizes=(3, 1), delay_s=0.002)) as server:
        scrapes = answers = 0

        async def ask() -> None:
            nonlocal answers
            while scrapes < 3:
                await server.serving.stream(stream_request())
                answers += 1

        load = asyncio.gather(*(ask() for _ in range(40)))
        for _ in range(3):
            assert list(text_string_to_metric_families(await server.scrape()))
            scrapes += 1
        await load
        families = {family.name: family for family in text_string_to_metric_families(await server.scrape())}
        (requests,) = [s for s in families["gemray_request"].samples if s.name == "gemray_request_total" and s.value]
        assert (requests.labels, requests.value) == ({"outcome": "length"}, answers)
        count = [s.value for s in families["gemray_time_to_first_token_seconds"].samples if s.name.endswith("_count")]
        assert count == [answers]


def test_tokens_of_one_step_share_its_time() -> None:
    registry = CollectorRegistry()
    times = iter([0.0, 0.5, 0.9, 1.0, 1.5])
    trace = RequestTrace("GenerateStream", RequestMetrics(registry), clock=lambda: next(times))
    for ids in ([1], [2, 3, 4, 5], [6]):
        trace.delta(SequenceDelta(request_id="r", token_ids=ids))
    trace.ended(grpc.StatusCode.OK)
    assert registry.get_sample_value("gemray_time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert registry.get_sample_value("gemray_inter_token_latency_seconds_count") == 5
    assert registry.get_sample_value("gemray_inter_token_latency_seconds_sum") == pytest.approx(0.5)
    # Four tokens at 0.1 s each, one at 0.1 s.
    assert registry.get_sample_value("gemray_inter_token_latency_seconds_bucket", {"le": "0.25"}) == 5
    assert registry.get_sample_value("gemray_inter_token_latency_seconds_bucket", {"le": "0.05"}) == 0
    assert registry.get_sample_value("gemray_request_duration_seconds_sum") == pytest.approx(1.5)


@pytest.mark.parametrize(("cached", "found"), [(0, "miss"), (16, "hit")])
def test_phases_of_a_request(caplog: pytest.LogCaptureFixture, cached: int, found: str) -> None:
    caplog.set_level(logging.INFO, logger="gemray.request")
    registry = CollectorRegistry()
    times = iter([0.0, 1.0, 4.0, 5.0, 8.0, 9.0])
    trace = RequestTrace("GenerateStream", RequestMetrics(registry), clock=lambda: next(times))
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, max_tokens=9)
    trace.submitted(Submit(request_id="r", prompt_ids=[1, 2], params=params))
    first = SequenceDelta(request_id="r", token_ids=[], queue_seconds=1.5, cached_tokens=cached)
    for delta in (first, SequenceDelta(request_id="r", token_ids=[1, 2]), SequenceDelta(request_id="r", token_ids=[3])):
        trace.delta(delta)
    trace.ended(grpc.StatusCode.OK)
    sums = {
        name: registry.get_sample_value(f"gemray_request_{name}_seconds_sum", labels)
        for name, labels in (("queue", {}), ("prefill", {"prefix_cache": found}), ("decode", {}))
    }
    assert sums == {"queue": 1.5, "prefill": 2.5, "decode": 3.0}
    assert " queue_ms=1500.0 first_token_ms=5000.0" in caplog.text


def test_phases_that_never_came_count_nowhere() -> None:
    registry = CollectorRegistry()
    times = iter([0.0, 1.0])
    RequestTrace("Generate", RequestMetrics(registry), clock=lambda: next(times)).ended(grpc.StatusCode.UNAVAILABLE)
    assert registry.get_sample_value("gemray_request_queue_seconds_count") == 0
    assert registry.get_sample_value("gemray_request_decode_seconds_count") == 0


def test_a_client_cannot_forge_a_log_line() -> None:
    line = key_values({"id": "x\nrequest id=y outcome=ok", "empty": "", "plain": "a-1_b.c"})
    assert "\n" not in line
    assert line == r'id="x\nrequest id=y outcome=ok" empty="" plain=a-1_b.c'
