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
    "second-drafter": {**OLD, "drafter": {"path": "/models/drafter", "second": {"path": "/models/other-drafter"}}},
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
    # With their cluster all of its drivers go at once, however many there are: none goes on without its workers.
    deployments = [pick(manifests, "Deployment") for manifests in (old, new)]
    assert len({deployment["metadata"]["name"] for deployment in deployments}) == 2
    selectors = [deployment["spec"]["selector"]["matchLabels"] for deployment in deployments]
    labels = [deployment["spec"]["template"]["metadata"]["labels"] for deployment in deployments]
    for n in (0, 1):
        assert selectors[n].items() <= labels[n].items()
        assert not selectors[n].items() <= labels[1 - n].items(), "two Deployments must not claim the same pods"
    # Clients notice nothing of that.
    assert pick(old, "Service") == pick(new, "Service")
    assert pick(old, "Service")["spec"]["selector"].items() <= labels[1].items()


IN_PLACE: dict[str, dict[str, Any]] = {
    "drivers": {**OLD, "gang": {"tensorParallelSize": 2, "replicas": 3}},
    "gangs": {**OLD, "server": {"replicas": 2}},
    "grace": {**OLD, "server": {"terminationGracePeriodSeconds": 300}},
}
SCALING: dict[str, Any] = {"server": {"maxReplicas": 2}}
SCALING_IN_PLACE: dict[str, dict[str, Any]] = {
    "most": {"server": {"maxReplicas": 4}},
    "patience": {**SCALING, "autoscaling": {"idleTimeoutSeconds": 60}},
}


@pytest.mark.parametrize(
    ("before", "after"),
    [(OLD, values) for values in IN_PLACE.values()] + [(SCALING, values) for values in SCALING_IN_PLACE.values()],
    ids=[*IN_PLACE, *SCALING_IN_PLACE],
)
def test_numbers_and_grace_change_in_place(before: dict[str, Any], after: dict[str, Any]) -> None:
    old, new = render(before), render(after)
    assert _cluster(old) == _cluster(new)
    assert pick(old, "RayCluster") != pick(new, "RayCluster")
    assert pick(old, "Deployment")["metadata"] == pick(new, "Deployment")["metadata"]
    assert pick(old, "Deployment")["spec"]["selector"] == pick(new, "Deployment")["spec"]["selector"]
    # The operator would replace all pods at once for what differs in their templates.
    assert pick(new, "RayCluster")["spec"]["upgradeStrategy"] == {"type": "None"}


def test_more_drivers_leave_those_that_serve_alone() -> None:
    old, new = render(OLD), render(IN_PLACE["drivers"])
    assert _pods(old) == _pods(new)
    assert pick(new, "Deployment")["spec"]["replicas"] == 3
    assert pick(new, "RayCluster")["spec"]["workerGroupSpecs"][0]["replicas"] == 3


def test_an_upgrade_leaves_the_numbers_of_an_autoscaler_alone() -> None:
    manifests = render({"autoscaling": {"enabled": True}, "server": {"maxReplicas": 2}})
    assert "replicas" not in pick(manifests, "Deployment")["spec"]
    assert "replicas" not in pick(manifests, "RayCluster")["spec"]["workerGroupSpecs"][0]
    assert pick(manifests, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": pick(manifests, "Deployment")["metadata"]["name"],
    }


def test_a_new_chart_alone_loads_no_model_again() -> None:
    """Its version is a label of the objects, not of the pods."""
    manifests = render()
    for template in _pods(manifests).values():
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(template["metadata"]["labels"])
    assert "helm.sh/chart" in pick(manifests, "Deployment")["metadata"]["labels"]


def test_drivers_of_one_cluster_are_replaced_one_by_one() -> None:
    assert pick(render(OLD), "Deployment")["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }
    # An existing cluster stays, whatever changes here: drivers may always go one by one.
    before, after = (render({"ray": {"existingCluster": name}}) for name in ("a", "b"))
    assert pick(before, "Deployment")["metadata"] == pick(after, "Deployment")["metadata"]
    assert pick(before, "Deployment")["spec"]["selector"] == pick(after, "Deployment")["spec"]["selector"]
    assert pick(before, "Deployment")["spec"]["template"] != pick(after, "Deployment")["spec"]["template"]


@pytest.mark.parametrize("change", ["image", "model", "drafter", "second-drafter", "no-drafter", "tp"])
def test_what_a_gang_serves_is_in_every_pod_template(change: str) -> None:
    """So that pods tell what they were made for, whatever their cluster is called."""
    old, new = _pods(render(OLD)), _pods(render(TOGETHER[change]))
    for kind, template in old.items():
        marks = [pod["metadata"]["annotations"]["gemray/serves"] for pod in (template, new[kind])]
        assert marks[0] != marks[1]
    assert len({pod["metadata"]["annotations"]["gemray/serves"] for pod in new.values()}) == 1


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
