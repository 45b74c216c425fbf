"""An upgrade: a change of what a gang serves changes the pods of driver, head and workers together, and goes back."""

from __future__ import annotations

from typing import Any

import pytest

from support.deployment.helm_chart import Manifest, pick, render

OLD: dict[str, Any] = {
    "drafter": {"path": "/models/drafter"},
    "gang": {"tensorParallelSize": 2},
    "image": {"tag": "1.0.0"},
}

TOGETHER: dict[str, dict[str, Any]] = {
    "image": {**OLD, "image": {"tag": "1.0.1"}},
    "model": {**OLD, "model": {"path": "/models/other"}},
    "drafter": {**OLD, "drafter": {"path": "/models/other-drafter"}},
    "no-drafter": {**OLD, "drafter": {"path": ""}},
    "tp": {**OLD, "gang": {"tensorParallelSize": 4}},
    "ray": {**OLD, "ray": {"version": "2.61.0"}},
    "worker-memory": {**OLD, "shm": {"worker": "24Gi"}},
}


def _pods(manifests: list[Manifest]) -> dict[str, Any]:
    cluster = pick(manifests, "RayCluster")["spec"]
    return {
        "driver": pick(manifests, "Deployment")["spec"]["template"],
        "head": cluster["headGroupSpec"]["template"],
        "worker": cluster["workerGroupSpecs"][0]["template"],
    }


def _cluster(manifests: list[Manifest]) -> str:
    return str(pick(manifests, "RayCluster")["metadata"]["name"])


@pytest.mark.parametrize("change", TOGETHER)
def test_drivers_and_workers_change_together(change: str) -> None:
    old, new = render(OLD), render(TOGETHER[change])
    # Another name is another object: Kubernetes makes new pods of every kind, whatever differs between the templates.
    assert _cluster(old) != _cluster(new)
    assert _pods(old)["driver"] != _pods(new)["driver"]
    assert pick(old, "Deployment")["metadata"]["name"] == pick(new, "Deployment")["metadata"]["name"]


@pytest.mark.parametrize("change", ["image", "model", "drafter", "no-drafter", "tp"])
def test_what_a_gang_serves_is_in_every_pod_template(change: str) -> None:
    """So that a RayCluster upgraded in place (`upgradeStrategy: Recreate`) is replaced as well."""
    old, new = _pods(render(OLD)), _pods(render(TOGETHER[change]))
    for kind, template in old.items():
        marks = [pod["metadata"]["annotations"]["gemray/serves"] for pod in (template, new[kind])]
        assert marks[0] != marks[1]
    assert len({pod["metadata"]["annotations"]["gemray/serves"] for pod in new.values()}) == 1
    assert pick(render(OLD), "RayCluster")["spec"]["upgradeStrategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("values", [OLD, *TOGETHER.values()])
def test_a_driver_joins_the_cluster_of_its_own_values(values: dict[str, Any]) -> None:
    manifests = render(values)
    (container,) = pick(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    head = f"{_cluster(manifests)}-head-svc.serving.svc:6379"
    assert f"--address={head}" in container["args"]
    assert {"name": "RAY_HEAD", "value": head} in container["env"]


def test_a_flag_of_the_server_leaves_the_workers_alone() -> None:
    old, new = render(OLD), render({**OLD, "server": {"extraArgs": ["--max-num-seqs=64"]}})
    assert pick(old, "RayCluster") == pick(new, "RayCluster")
    assert _pods(old)["driver"] != _pods(new)["driver"]


def test_going_back_gives_the_old_manifests() -> None:
    """`helm rollback` applies what was rendered; rendering depends on the values alone."""
    assert render(OLD) == render(dict(reversed(OLD.items())))


def test_names_leave_room_for_what_the_operator_appends() -> None:
    cluster = pick(render({"fullnameOverride": "x" * 60}), "RayCluster")["metadata"]["name"]
    assert len(cluster) <= 53, "KubeRay's limit"


def test_workers_and_head_outlast_the_drain_of_the_drivers() -> None:
    pods = _pods(render({**OLD, "server": {"terminationGracePeriodSeconds": 300}}))
    grace = {kind: pod["spec"]["terminationGracePeriodSeconds"] for kind, pod in pods.items()}
    assert grace["driver"] < grace["worker"] < grace["head"]
    assert grace["driver"] == 300
    for kind in ("worker", "head"):
        assert "preStop" in pods[kind]["spec"]["containers"][0]["lifecycle"]
