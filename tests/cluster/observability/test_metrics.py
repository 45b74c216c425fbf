"""The series of a gang: names, values, and that every one of the dashboard exists."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gemray_cluster.gang.client import GangState
from gemray_cluster.gang.router import Router
from gemray_cluster.gang.scaling import ReplicaLimits
from gemray_cluster.observability.common_labels import with_model
from gemray_cluster.observability.metrics import EngineCollector, MetricsServer, RequestMetrics, WatchedGang
from gemray_workers.errors import AddressUnavailable
from support.cluster.fake_gang import FakeGang, gang_info
from support.cluster.series import SteppedGang, all_names, scrape
from support.deployment.helm_chart import CHART
from support.waiting import HANG_S


def test_engine_series() -> None:
    registry = CollectorRegistry()
    registry.register(
        EngineCollector(
            SteppedGang(seconds_since_heartbeat=0.25, gang_info=gang_info(num_draft_tokens=4, two_drafters=True))
        )
    )
    samples = scrape(registry)
    expected: dict[tuple[Any, ...], float] = {
        ("gemray_engine_running_requests",): 3,
        ("gemray_engine_waiting_requests",): 2,
        ("gemray_engine_step_seconds",): 0.0125,
        ("gemray_engine_steps_total",): 12,
        ("gemray_engine_preemptions_total",): 1,
        ("gemray_engine_prompt_tokens_total",): 700,
        ("gemray_engine_generated_tokens_total",): 90,
        ("gemray_engine_draft_seconds_total",): 0.5,
        ("gemray_engine_verify_seconds_total",): 2.5,
        ("gemray_engine_compiled_programs_total",): 4,
        ("gemray_prefix_cache_queries_total",): 800,
        ("gemray_prefix_cache_hits_total",): 100,
        ("gemray_prefix_cache_evictions_total",): 6,
        ("gemray_kv_pages_cached", ("group", "full")): 20,
        ("gemray_heartbeat_age_seconds",): 0.25,
        ("gemray_kv_pages_in_use", ("group", "sliding")): 5,
        ("gemray_kv_pages_in_use", ("group", "full")): 9,
        ("gemray_kv_pages", ("group", "full")): 80,
        ("gemray_speculation_rounds_total",): 20,
        ("gemray_speculation_drafted_tokens_total",): 80,
        ("gemray_speculation_accepted_tokens_total",): 50,
        ("gemray_speculation_accepted_position_tokens_total", ("position", "0")): 19,
        ("gemray_speculation_accepted_position_tokens_total", ("position", "3")): 6,
        ("gemray_drafter_rounds_total", ("method", "mtp")): 20,
        ("gemray_drafter_drafted_tokens_total", ("method", "mtp")): 80,
        ("gemray_drafter_accepted_tokens_total", ("method", "mtp")): 50,
        ("gemray_drafter_rounds_total", ("method", "dflash")): 0,
        ("gemray_engine_step_duration_seconds_bucket", ("le", "0.008")): 0,
        ("gemray_engine_step_duration_seconds_bucket", ("le", "0.012")): 11,
        ("gemray_engine_step_duration_seconds_bucket", ("le", "5.0")): 11,
        ("gemray_engine_step_duration_seconds_bucket", ("le", "+Inf")): 12,
        ("gemray_engine_step_duration_seconds_sum",): 8.25,
        ("gemray_engine_batch_requests_bucket", ("le", "4.0")): 12,
        ("gemray_engine_batch_requests_count",): 12,
        ("gemray_gang_state", ("state", "serving")): 1,
        ("gemray_gang_state", ("state", "failed")): 0,
    }
    found = {key: samples[key[0], frozenset({("replica", "0"), *key[1:]})] for key in expected}
    assert found == expected


@pytest.mark.parametrize(("served", "model"), [(None, "org/fake"), ("ours", "ours")])
def test_what_is_served_is_labels(served: str | None, model: str) -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(SteppedGang(), served))
    labels = {
        "version": version("gemray"), "model": model, "revision": "f" * 40, "checkpoint_hash": "0123",
        "numerics": "fast", "drafter": "", "replica": "0",
    }  # fmt: skip
    assert scrape(registry)["gemray_build_info", frozenset(labels.items())] == 1


def test_every_series_has_the_models_name() -> None:
    registry = CollectorRegistry()
    RequestMetrics(registry).requests.labels("length").inc()
    bare = scrape(registry)
    registry.register(EngineCollector(SteppedGang(), "ours"))
    samples = scrape(with_model(registry, "ours"))
    assert {dict(labels)["model"] for _, labels in samples} == {"ours"}
    assert bare.items() <= {(name, labels - {("model", "ours")}): v for (name, labels), v in samples.items()}.items()
    assert samples["gemray_request_total", frozenset({("model", "ours"), ("outcome", "length")})] == 1
    build = [dict(labels) for name, labels in samples if name == "gemray_build_info"]
    assert [labels["revision"] for labels in build] == ["f" * 40]


@pytest.mark.parametrize("gang", [Router(ReplicaLimits(), max_rebuilds=0), FakeGang(state=GangState.STARTING)])
def test_a_starting_gang_has_a_state_and_no_engine(gang: WatchedGang) -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(gang))
    samples = scrape(registry)
    assert samples["gemray_gang_state", frozenset({("replica", "0"), ("state", "starting")})] == 1
    assert not [name for name, _ in samples if name.startswith("gemray_engine_")]


class TwoReplicas:
    """One of them rebuilt."""

    replicas = (
        *SteppedGang().replicas,
        replace(SteppedGang(state=GangState.STARTING, num_rebuilds=2).replicas[0], index=1, num_live=4),
    )


def test_replicas_have_series_of_their_own() -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(TwoReplicas()))
    samples = scrape(registry)

    def of(name: str, **labels: str) -> list[float]:
        return [samples[name, frozenset({("replica", index), *labels.items()})] for index in "01"]

    assert of("gemray_gang_state", state="serving") == [1, 0]
    assert of("gemray_gang_rebuilds_total") == [0, 2]
    assert of("gemray_gang_requests_in_flight") == [0, 4]
    assert of("gemray_engine_generated_tokens_total") == [90, 90]
    assert of("gemray_kv_pages", group="full") == [80, 80]


def test_names_end_with_what_they_count() -> None:
    units = "queries|hits|evictions|pages_cached|"
    units += "seconds|tokens|requests?|pages|steps|programs|preemptions|rebuilds|rounds|pages_in_use|requests_in_flight"
    allowed = re.compile(rf"gemray(_\w+)??_({units}|state|build_info)(_total|_created|_bucket|_count|_sum)?")
    assert [name for name in all_names() if not allowed.fullmatch(name)] == []


def test_every_series_of_the_dashboard_exists() -> None:
    dashboard = json.loads((CHART / "dashboards" / "gemray.json").read_text())
    used = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"gemray_\w+", target["expr"])
    }
    used |= {
        name for variable in dashboard["templating"]["list"] for name in re.findall(r"gemray_\w+", variable["query"])
    }
    assert len(used) > 15
    assert used - all_names() == set()


def test_a_taken_port_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressUnavailable, match=rf"127\.0\.0\.1:{port}.*in use.*--metrics-port"):
            MetricsServer(CollectorRegistry(), host="127.0.0.1", port=port)


def test_connections_that_ask_nothing_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of scrapers whose host has vanished: each would hold a thread and a file."""
    monkeypatch.setattr("gemray_cluster.observability.metrics._Handler.timeout", 0.2)
    server = MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), HANG_S) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection(("127.0.0.1", server.port), HANG_S) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n")
            assert slow.recv(1) == b""
        with socket.create_connection(("127.0.0.1", server.port), HANG_S) as asking:
            asking.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert asking.recv(12) == b"HTTP/1.0 200"
    finally:
        server.close()
