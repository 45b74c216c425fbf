"""Series of each replica's gang and engine: gauges of the moment, and counters that go on over rebuilds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate, zip_longest
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gemray_cluster.gang.client import GangState, ReplicaStatus
from gemray_workers.messages import (
    BATCH_SIZE_BOUNDS,
    STEP_SECONDS_BOUNDS,
    Distribution,
    EngineStats,
    ModelInfo,
    SpeculationCounters,
)

F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily)

REPLICA = "replica"
"""Label of every series in here: the replica's index."""


class SeriesFamilies:
    """Samples of all replicas, by name: the text format wants those of one name together."""

    def __init__(self) -> None:
        """No sample yet."""
        self._families: dict[str, Metric] = {}

    def __iter__(self) -> Iterator[Metric]:
        """Every family that has a sample, in the order in which the names came."""
        return iter(self._families.values())

    def gauge(self, name: str, meaning: str, value: float, **labels: str) -> None:
        """Add a sample of what is now."""
        self._family(GaugeMetricFamily, name, meaning, labels).add_metric(list(labels.values()), value)

    def counter(self, name: str, meaning: str, value: float, **labels: str) -> None:
        """Add a sample of what only grows; the name's end, ``_total``, is added."""
        self._family(CounterMetricFamily, name, meaning, labels).add_metric(list(labels.values()), value)

    def histogram(self, name: str, meaning: str, bounds: Sequence[float], values: Distribution, **labels: str) -> None:
        """Add a histogram over `bounds`."""
        at_most = accumulate(values.counts or [0] * (len(bounds) + 1))
        les = [*(str(float(bound)) for bound in bounds), "+Inf"]
        buckets = [(le, float(count)) for le, count in zip(les, at_most, strict=True)]
        self._family(HistogramMetricFamily, name, meaning, labels).add_metric(
            list(labels.values()), buckets, values.total
        )

    def _family(self, kind: type[F], name: str, meaning: str, labels: dict[str, str]) -> F:
        family = self._families.setdefault(name, kind(name, meaning, labels=list(labels)))
        assert isinstance(family, kind), f"{name} is of two types"
        return family


def add_replica(families: SeriesFamilies, replica: ReplicaStatus, served_name: str | None = None) -> None:
    """All samples of one replica; `served_name` is the model's, None for the checkpoint's own."""
    labels = {REPLICA: str(replica.index)}
    add_state(families, index=replica.index, state=replica.state)
    families.gauge(
        "gemray_heartbeat_age_seconds",
        "Since the newest message from rank 0.",
        replica.seconds_since_heartbeat,
        **labels,
    )
    families.counter(
        "gemray_gang_rebuilds",
        "Times that the gang serves again after it had failed.",
        replica.num_rebuilds,
        **labels,
    )
    families.gauge(
        "gemray_gang_requests_in_flight", "Requests given to the gang and not ended.", replica.num_live, **labels
    )
    if replica.info is not None:
        _add_identity(families, replica.info.model, served_name, labels)
    if replica.stats is not None:
        _add_engine(families, replica.stats, labels)
        if replica.info is not None:
            _add_drafters(families, replica.stats.speculation, replica.info.model, labels)


def _add_identity(families: SeriesFamilies, model: ModelInfo, served_name: str | None, labels: dict[str, str]) -> None:
    """What is served, as labels: other series are joined with it."""
    families.gauge(
        "gemray_build_info",
        "1, with what is served as labels.",
        1.0,
        version=version("gemray"),
        model=served_name or model.checkpoint.name,
        revision=model.checkpoint.revision,
        checkpoint_hash=model.checkpoint.hash,
        numerics=model.numerics,
        drafter=", ".join(drafter.checkpoint.name for drafter in model.drafters),
        **labels,
    )


def add_state(families: SeriesFamilies, *, index: int, state: GangState) -> None:
    """A sample for each state that a gang may be in."""
    for candidate in GangState:
        families.gauge(
            "gemray_gang_state",
            "1 for the state that the gang is in.",
            float(candidate is state),
            replica=str(index),
            state=candidate.value,
        )


def _add_engine(families: SeriesFamilies, stats: EngineStats, labels: dict[str, str]) -> None:
    gauges = {
        "gemray_engine_running_requests": ("Requests that hold KV pages.", stats.num_running),
        "gemray_engine_waiting_requests": ("Requests in the queue for KV pages.", stats.num_waiting),
        "gemray_engine_step_seconds": ("Duration of the newest engine step.", stats.last_step_seconds),
    }
    for name, (meaning, value) in gauges.items():
        families.gauge(name, meaning, value, **labels)
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
        families.counter(name, meaning, value, **labels)
    families.histogram(
        "gemray_engine_step_duration_seconds",
        "Durations of steps that computed something.",
        STEP_SECONDS_BOUNDS,
        stats.step_seconds,
        **labels,
    )
    families.histogram(
        "gemray_engine_batch_requests", "Requests of a step.", BATCH_SIZE_BOUNDS, stats.batch_sizes, **labels
    )
    for position, accepted in enumerate(stats.speculation.accepted_per_position):
        families.counter(
            "gemray_speculation_accepted_position_tokens",
            "Drafted tokens accepted, by position in the draft (0 is the first).",
            accepted,
            position=str(position),
            **labels,
        )
    for name, meaning, pages in (
        ("gemray_kv_pages_in_use", "KV pages that sequences hold.", stats.pages_in_use),
        ("gemray_kv_pages", "KV pages there are.", stats.pages_total),
        ("gemray_kv_pages_cached", "KV pages that the prefix cache finds, held or not.", stats.pages_cached),
    ):
        for group, count in pages.items():
            families.gauge(name, meaning, count, group=group, **labels)


def _add_drafters(
    families: SeriesFamilies, speculation: SpeculationCounters, model: ModelInfo, labels: dict[str, str]
) -> None:
    """The counts of speculation by drafter."""
    for drafter, counters in zip_longest(model.drafters, speculation.by_drafter):
        if drafter is None:
            return
        told = counters or SpeculationCounters()
        for name, meaning, value in (
            ("rounds", "Rounds of draft and verify, by drafter.", told.rounds),
            ("drafted_tokens", "Tokens drafted, by drafter.", told.drafted),
            ("accepted_tokens", "Drafted tokens accepted, by drafter.", told.accepted),
        ):
            families.counter(f"gemray_drafter_{name}", meaning, value, method=drafter.method, **labels)
