"""Names that YAML would take for numbers, dates, truth values or aliases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.deployment.chart_values import Values
from support.deployment.helm_chart import pick, problems, render

NAMED = {"name", "secretName", "claimName", "key", "host", "hostname", "ingressClassName", "runtimeClassName", "path"}
NAMED |= {"app.kubernetes.io/instance", "ray.io/cluster", "priorityClassName", "subPath", "mountPath"}


def _named(name: str) -> Values:
    """Every object that the chart is told by name has the name `name`."""
    return {
        "fullnameOverride": "gemray",
        "image": {"repository": name, "tag": name, "pullSecrets": [name]},
        "priorityClassName": name,
        "ray": {
            "auth": {"existingSecret": name},
            "gcsFaultTolerance": {
                "enabled": True,
                "redisAddress": "redis:6379",
                "passwordSecret": name,
                "passwordKey": name,
            },
        },
        "model": {
            "volume": {
                "type": "download",
                "pvc": {"claimName": name, "subPath": name},
                "download": {"repository": "a/b", "keep": "claim", "tokenSecret": name},
            }
        },
        "tls": {"secretName": name, "serverName": name},
        "apiToken": {"secretName": name, "key": name},
        "tritonCache": {"type": "pvc", "pvc": {"claimName": name}},
        "worker": {"runtimeClassName": name, "nodeSelector": {"pool": name}, "labels": {"team": name}},
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": name}],
            "hostnames": [name],
            "backendTLS": {"caConfigMap": name},
        },
        "ingress": {"enabled": True, "className": name, "host": name, "tlsSecret": name},
        "openai": {
            "enabled": True,
            "tlsSecret": name,
            "ingress": {"enabled": True, "className": name, "host": f"{name}.example", "tlsSecret": name},
        },
    }


def _names(part: Any) -> Iterator[tuple[str, object]]:
    if isinstance(part, dict):
        for key, value in part.items():
            if key in NAMED and not isinstance(value, dict):
                yield key, value
            yield from _names(value)
    elif isinstance(part, list):
        for value in part:
            yield from _names(value)


@pytest.mark.parametrize("name", ["123", "1e3", "0x1f", "2026-11-30", "null", "true", "on", "no"])
def test_a_name_stays_a_name(name: str) -> None:
    """A Secret may well have the name 123."""
    manifests = render(_named(name), release=name)
    assert [found for manifest in manifests for found in problems(manifest)] == []
    assert [(key, value) for key, value in _names(manifests) if not isinstance(value, str)] == []
    assert pick(manifests, "Service")["metadata"]["labels"]["app.kubernetes.io/instance"] == name


@pytest.mark.parametrize("name", ["true", "null", "on"])
def test_a_release_may_have_the_name_of_a_truth_value(name: str) -> None:
    manifests = render({"fullnameOverride": name, "ingress": {"enabled": True, "host": "gemray.example"}})
    assert pick(manifests, "Ingress")["metadata"]["name"] == name
    assert [found for manifest in manifests for found in problems(manifest)] == []


def test_an_ingress_may_hold_for_all_hosts_of_a_domain() -> None:
    values = {"ingress": {"enabled": True, "host": "*.gemray.example", "tlsSecret": "edge"}}
    spec = pick(render(values), "Ingress")["spec"]
    assert (spec["rules"][0]["host"], spec["tls"][0]["hosts"]) == ("*.gemray.example", ["*.gemray.example"])


def test_policies_find_the_pods_of_an_existing_cluster_by_its_name() -> None:
    policy = pick(render({"ray": {"existingCluster": "on"}}), "NetworkPolicy", "-internal")
    peers = policy["spec"]["ingress"][0]["from"]
    assert {"podSelector": {"matchLabels": {"ray.io/cluster": "on"}}} in peers
