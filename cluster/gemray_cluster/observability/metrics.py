"""What operators watch: Prometheus series of requests and of the engine, in base units, and their HTTP endpoint.

Requests are recorded as they happen (`request_trace`); the engine's numbers are read from its newest `EngineStats` at
each scrape, so scraping costs nothing between scrapes. docs/deploy.md lists the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Thread
from typing import Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gemray_cluster.gang.client import GangState
from gemray_workers.errors import GemrayError
from gemray_workers.messages import EngineStats

_FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.012, 0.016, 0.024, 0.032, 0.05, 0.1, 0.25, 0.5, 1, 5)
_DURATION_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LENGTH_BUCKETS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class WatchedGang(Protocol):
    """The part of a `GangClient` that a scrape reads."""

    @property
    def state(self) -> GangState:
        """Where the gang stands."""
        ...

    @property
    def stats(self) -> EngineStats | None:
        """The newest statistics, or None before the first step."""
        ...

    @property
    def seconds_since_heartbeat(self) -> float:
        """Age of the newest message from rank 0."""
        ...

    @property
    def num_rebuilds(self) -> int:
        """How often a failed gang was replaced."""
        ...


class RequestMetrics:
    """Counters and histograms of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "gemray_request",
            "Generation requests that ended, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.in_flight = Gauge("gemray_requests_in_flight", "Generation requests not ended yet.", registry=registry)
        self.first_token = Histogram(
            "gemray_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.inter_token = Histogram(
            "gemray_inter_token_latency_seconds",
            "Time per token after the first; the tokens of one step share its time equally.",
            buckets=_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "gemray_request_duration_seconds",
            "From a request's arrival to its end, whatever the outcome.",
            buckets=_DURATION_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Histogram(
            "gemray_request_prompt_tokens",
            "Prompt length of requests that reached the engine.",
            buckets=_LENGTH_BUCKETS,
            registry=registry,
        )
        self.completion_tokens = Histogram(
            "gemray_request_completion_tokens",
            "Tokens generated for requests that reached the engine.",
            buckets=_LENGTH_BUCKETS,
            registry=registry,
        )


class EngineCollector(Collector):
    """Turns a gang's newest statistics into series at each scrape."""

    def __init__(self, gang: Callable[[], WatchedGang | None]) -> None:
        """`gang` gives the gang of the moment."""
        self._gang = gang

    def describe(self) -> Iterable[Metric]:
        """Nothing: the series are those of `collect`, and registering must not ask the gang."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Series of the gang's state, then of its engine once that has stepped."""
        gang = self._gang()
        state = GangState.STARTING if gang is None else gang.state
        states = GaugeMetricFamily("gemray_gang_state", "1 for the state that the gang is in.", labels=["state"])
        for candidate in GangState:
            states.add_metric([candidate.value], float(candidate is state))
        yield states
        if gang is None:
            return
        yield GaugeMetricFamily(
            "gemray_heartbeat_age_seconds",
            "Since the newest message from rank 0.",
            value=gang.seconds_since_heartbeat,
        )
        yield CounterMetricFamily(
            "gemray_gang_rebuilds", "Times that the gang serves again after it had failed.", value=gang.num_rebuilds
        )
        if gang.stats is not None:
            yield from _engine_series(gang.stats)


def _engine_series(stats: EngineStats) -> Iterator[Metric]:
    gauges = {
        "gemray_engine_running_requests": ("Requests that hold KV pages.", stats.num_running),
        "gemray_engine_waiting_requests": ("Requests in the queue for KV pages.", stats.num_waiting),
        "gemray_engine_step_seconds": ("Duration of the newest engine step.", stats.last_step_seconds),
    }
    for name, (meaning, value) in gauges.items():
        yield GaugeMetricFamily(name, meaning, value=value)
    counters = {
        "gemray_engine_steps": ("Engine steps.", stats.step),
        "gemray_engine_preemptions": ("Requests set back because pages ran out.", stats.num_preemptions),
        "gemray_engine_prompt_tokens": ("Prompt rows computed, recomputation included.", stats.prompt_tokens),
        "gemray_engine_generated_tokens": ("Tokens generated.", stats.generated_tokens),
        "gemray_engine_draft_seconds": ("Time spent drafting.", stats.draft_seconds),
        "gemray_engine_verify_seconds": ("Time in the target's passes and the choice of tokens.", stats.verify_seconds),
        "gemray_engine_compiled_programs": ("Triton programs compiled since ready.", stats.compiled_programs),
        "gemray_prefix_cache_queries": ("Tokens of requests that the cache was asked for.", stats.prefix_cache_queries),
        "gemray_prefix_cache_hits": ("Tokens of them whose KV was there.", stats.prefix_cache_hits),
        "gemray_prefix_cache_evictions": ("KV pages it gave up for others.", stats.prefix_cache_evictions),
        "gemray_speculation_rounds": ("Rounds of draft and verify.", stats.speculation.rounds),
        "gemray_speculation_drafted_tokens": ("Tokens drafted.", stats.speculation.drafted),
        "gemray_speculation_accepted_tokens": ("Drafted tokens accepted.", stats.speculation.accepted),
    }
    for name, (meaning, value) in counters.items():
        yield CounterMetricFamily(name, meaning, value=value)
    by_position = CounterMetricFamily(
        "gemray_speculation_accepted_position_tokens",
        "Drafted tokens accepted, by position in the draft (0 is the first).",
        labels=["position"],
    )
    for position, accepted in enumerate(stats.speculation.accepted_per_position):
        by_position.add_metric([str(position)], accepted)
    yield by_position
    for name, meaning, pages in (
        ("gemray_kv_pages_in_use", "KV pages that sequences hold.", stats.pages_in_use),
        ("gemray_kv_pages", "KV pages there are.", stats.pages_total),
        ("gemray_kv_pages_cached", "KV pages that the prefix cache finds, held or not.", stats.pages_cached),
    ):
        family = GaugeMetricFamily(name, meaning, labels=["group"])
        for group, count in pages.items():
            family.add_metric([group], count)
        yield family


class MetricsServer:
    """The HTTP endpoint ``/metrics``, in a thread of its own."""

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        """Listen on `host`:`port` (0 takes any free port). Raises GemrayError when the port is taken."""
        try:
            self._server: WSGIServer
            self._thread: Thread
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise GemrayError(f"cannot serve metrics on {host}:{port}: {error.strerror}; see --metrics-port") from error

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
