"""What operators watch: Prometheus series of requests and of the engine, in base units, and their HTTP endpoint.

Requests are recorded as they happen (`request_trace`); the engine's numbers are read from its newest `EngineStats` at
each scrape, so scraping costs nothing between scrapes. docs/deploy.md lists the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Thread
from typing import Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from gemray.channel_options import host_and_port
from gemray_cluster.gang.client import GangState, ReplicaStatus
from gemray_cluster.observability.engine_series import SeriesFamilies, add_replica, add_state
from gemray_cluster.observability.phases import Phase, Phases
from gemray_workers.errors import AddressUnavailable

READ_S = 30.0
"""How long a scraper may take to ask."""
OUTCOMES = (
    *("stop_token", "stop_string", "grammar", "tool_call", "length"),
    *("cancelled", "deadline", "invalid", "rejected", "unauthenticated", "unavailable", "cut", "error"),
)
"""How a request may end: as its text did, or what its client or the server did to it."""

_FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.012, 0.016, 0.024, 0.032, 0.05, 0.1, 0.25, 0.5, 1, 5)
_DURATION_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LENGTH_BUCKETS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class WatchedGang(Protocol):
    """The part of a `ReplicatedGang` that a scrape reads."""

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        """How each gang stands."""
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
        for outcome in OUTCOMES:
            self.requests.labels(outcome)  # from 0 on: Prometheus sees no rise in a series that begins with one
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
        self.queue = Histogram(
            "gemray_request_queue_seconds",
            "Wait for a slot and KV pages.",
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.prefill = Histogram(
            "gemray_request_prefill_seconds",
            "From the slot to the first token, by whether the prefix cache had the prompt's beginning.",
            ["prefix_cache"],
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        for found in ("hit", "miss"):
            self.prefill.labels(found)
        self.decode = Histogram(
            "gemray_request_decode_seconds",
            "From the first token to the last.",
            buckets=_DURATION_BUCKETS_S,
            registry=registry,
        )

    def phase_ended(self, phase: Phase, phases: Phases) -> None:
        """Record how long a phase took, if it was one."""
        seconds = phases.seconds(phase)
        if seconds is None:
            return
        histograms = {
            Phase.QUEUE: self.queue,
            Phase.PREFILL: self.prefill.labels("hit" if phases.cached_tokens else "miss"),
            Phase.DECODE: self.decode,
        }
        histograms[phase].observe(seconds)


class EngineCollector(Collector):
    """Turns the newest statistics of each replica into series at each scrape."""

    def __init__(self, gang: WatchedGang, served_name: str | None = None) -> None:
        """Ask nothing yet; `served_name` is the model's, None for the checkpoint's own."""
        self._gang = gang
        self._served_name = served_name

    def describe(self) -> Iterable[Metric]:
        """Nothing: the series are those of `collect`, and registering must not ask the gang."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Series of each replica's state, then of its engine once that has stepped."""
        families = SeriesFamilies()
        replicas = self._gang.replicas
        for replica in replicas:
            add_replica(families, replica, self._served_name)
        if not replicas:
            add_state(families, index=0, state=GangState.STARTING)  # the first is still to come
        yield from families


class _Handler(WSGIRequestHandler):
    """Answers one scrape; a connection over which none comes would hold a thread and a file for ever."""

    timeout = READ_S

    @override
    def handle(self) -> None:
        with suppress(TimeoutError):
            super().handle()

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


class MetricsServer:
    """The HTTP endpoint ``/metrics``, in a thread of its own."""

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        """Listen on `host`:`port` (0 takes any free port). Raises AddressUnavailable."""
        try:
            self._server: WSGIServer
            self._thread: Thread
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
            self._server.RequestHandlerClass = _Handler
        except OSError as error:
            where = host_and_port(host, port)
            raise AddressUnavailable(
                f"cannot serve metrics on {where}: {error.strerror}; see --metrics-port"
            ) from error

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
