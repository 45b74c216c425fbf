"""Labels that every series of a server has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

MODEL = "model"
"""What clients call the model: servers of several models are told apart by it."""


class CommonLabels(Collector):
    """The series of a registry, each with the same labels beside its own; one of its own by such a name stays."""

    def __init__(self, registry: CollectorRegistry, **labels: str) -> None:
        """Read nothing yet."""
        self._registry = registry
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Collect the registry's series, labelled."""
        for family in self._registry.collect():
            labelled = Metric(family.name, family.documentation, family.type)
            labelled.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in family.samples]
            yield labelled


def with_model(registry: CollectorRegistry, model: str) -> CollectorRegistry:
    """A registry of the same series with the label `MODEL`."""
    outer = CollectorRegistry()
    outer.register(CommonLabels(registry, **{MODEL: model}))
    return outer
