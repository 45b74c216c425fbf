"""The series of a server, as Prometheus reads them over HTTP."""

from __future__ import annotations

import urllib.request

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gemray_cluster.observability.metrics import EngineCollector, MetricsServer, RequestMetrics
from gemray_workers.messages import Distribution, EngineStats, SpeculationCounters
from support.cluster.fake_gang import FakeGang, gang_info
from support.waiting import HANG_S

STATS = EngineStats(
    step=12,
    num_running=3,
    num_waiting=2,
    num_preemptions=1,
    pages_in_use={"sliding": 5, "full": 9},
    pages_total={"sliding": 40, "full": 80},
    prompt_tokens=700,
    generated_tokens=90,
    last_step_seconds=0.0125,
    draft_seconds=0.5,
    verify_seconds=2.5,
    compiled_programs=4,
    prefix_cache_queries=800,
    prefix_cache_hits=100,
    prefix_cache_evictions=6,
    step_seconds=Distribution(counts=[0] * 4 + [11] + [0] * 9 + [1], total=8.25),
    batch_sizes=Distribution(counts=[2, 0, 10] + [0] * 8, total=36.0),
    pages_cached={"sliding": 7, "full": 20},
    speculation=SpeculationCounters(rounds=20, drafted=80, accepted=50, accepted_per_position=[19, 15, 10, 6]),
)


class SteppedGang(FakeGang):
    """Its engine has stepped."""

    @property
    def stats(self) -> EngineStats | None:
        return STATS


def scrape(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Samples as Prometheus reads them over HTTP."""
    server = MetricsServer(registry, host="127.0.0.1", port=0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=HANG_S) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def all_names() -> set[str]:
    """Names of all samples of a server with drafters."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(SteppedGang(gang_info=gang_info(num_draft_tokens=4, two_drafters=True))))
    RequestMetrics(registry)
    return {name for name, _ in scrape(registry)}
