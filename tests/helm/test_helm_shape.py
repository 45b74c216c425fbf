"""What the rendered manifests mean: GPUs, pods, memory, secrets, probes, and that selectors find their pods."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.deployment.chart_values import DEPLOYMENTS as ALL
from support.deployment.helm_chart import Manifest, driver_arguments, driver_settings, pick, render

DEPLOYMENTS = {name: values for name, values in ALL.items() if name != "existing-cluster"}
"""Those with a RayCluster of their own."""


def _driver(manifests: list[Manifest]) -> Manifest:
    return pick(manifests, "Deployment")["spec"]["template"]


def _workers(manifests: list[Manifest]) -> Manifest:
    group = pick(manifests, "RayCluster")["spec"]["workerGroupSpecs"][0]
    assert group["groupName"] == "gang"
    return dict(group)


@pytest.mark.parametrize(
    ("name", "gpus", "hosts", "replicas"),
    [
        ("default", 1, 1, 1),
        ("tp2-one-pod", 2, 1, 1),
        ("tp8-whole-node", 8, 1, 1),
        ("tp16-two-hosts", 8, 2, 1),
        ("tp2-two-hosts", 1, 2, 1),
        ("replicas", 1, 1, 3),
        ("drafter", 2, 1, 1),
        ("dedicated-drafter", 3, 1, 1),
        ("dedicated-drafter-apart", 8, 1, 2),
    ],
)
def test_gang_is_one_pod_where_it_fits(name: str, gpus: int, hosts: int, replicas: int) -> None:
    manifests = render(DEPLOYMENTS[name])
    group = _workers(manifests)
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert container["resources"]["requests"]["nvidia.com/gpu"] == gpus
    assert group["rayStartParams"]["num-gpus"] == group["rayStartParams"]["num-cpus"] == str(gpus)
    assert (group["numOfHosts"], group["replicas"], group["minReplicas"], group["maxReplicas"]) == (
        hosts,
        replicas,
        replicas,
        replicas,
    )
    assert pick(manifests, "Deployment")["spec"]["replicas"] == replicas


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_cpus_are_those_that_the_driver_asks_for(name: str) -> None:
    """Over all worker groups, per gang; and one pod has them all where the driver insists on one node."""
    manifests = render(DEPLOYMENTS[name])
    groups = pick(manifests, "RayCluster")["spec"]["workerGroupSpecs"]
    settings = driver_settings(manifests)
    cpus = [int(group["rayStartParams"]["num-cpus"]) * group["numOfHosts"] for group in groups]
    assert sum(cpus) == settings.num_ranks
    drivers = pick(manifests, "Deployment")["spec"].get("replicas", 2 if name == "hpa" else 1)
    # Where Ray's autoscaler decides, no number is set, and it begins with the least.
    gangs = {"router-that-scales": settings.min_replicas}.get(name, settings.replicas) or 1
    assert {group.get("replicas", group["minReplicas"]) for group in groups} == {drivers * gangs}
    if settings.strategy == "strict_pack":
        assert (len(groups), groups[0]["numOfHosts"]) == (1, 1)


def test_cpu_gang_asks_for_no_gpu() -> None:
    group = _workers(render(DEPLOYMENTS["cpu"]))
    assert "nvidia.com/gpu" not in group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert group["rayStartParams"]["num-cpus"] == "2"
    assert "num-gpus" not in group["rayStartParams"]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_shared_memory_is_mounted_where_nccl_runs(name: str) -> None:
    manifests = render(DEPLOYMENTS[name])
    for template, size in ((_workers(manifests)["template"], "12Gi"), (_driver(manifests), "1Gi")):
        pod = template["spec"]
        volume = next(v for v in pod["volumes"] if v["name"] == "shared-mem")
        written = 8589934592 if (name, size) == ("quantities", "12Gi") else size
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": written}
        assert {"name": "shared-mem", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_worker_and_driver_see_the_model_at_the_same_path(name: str) -> None:
    manifests = render(DEPLOYMENTS[name])
    worker, driver = _workers(manifests)["template"]["spec"], _driver(manifests)["spec"]
    assert [v for v in worker["volumes"] if v["name"] == "model"] == [
        v for v in driver["volumes"] if v["name"] == "model"
    ]
    mounts = [next(m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "model") for pod in (worker, driver)]
    assert mounts[0] == mounts[1]
    (model,) = [a for a in driver["containers"][0]["args"] if a.startswith("--model=")]
    assert model.startswith(f"--model={mounts[0]['mountPath']}/")
    assert model.endswith("/target")


def test_test_pod_has_what_a_client_needs() -> None:
    pod = pick(render(DEPLOYMENTS["mtls-and-token"]), "Pod")["spec"]
    command = pod["containers"][0]["command"]
    files = [argument.partition("=")[2] for argument in command if "-file=" in argument]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]} == {"tls", "api-token"}
    assert len(files) == 4
    assert all(file.rpartition("/")[0] in mounts.values() for file in files)
    assert command[:3] == ["gemray", "generate", "--address=demo-gemray:50051"]


def test_driver_is_told_device_and_placement() -> None:
    for name, device, strategy in (
        ("tp8-whole-node", "cuda", "strict_pack"),
        ("tp16-two-hosts", "cuda", "pack"),
        ("cpu", "cpu", "strict_pack"),
    ):
        assert {f"--device={device}", f"--strategy={strategy}"} <= set(driver_arguments(render(DEPLOYMENTS[name])))


def test_download_gives_weights_to_ranks_alone() -> None:
    manifests = render(DEPLOYMENTS["download"])
    (worker,) = _workers(manifests)["template"]["spec"]["initContainers"]
    (driver,) = _driver(manifests)["spec"]["initContainers"]
    assert worker["command"] == [
        "hf", "download", "google/gemma-4-31b-it", "--revision", "main", "--local-dir", "/models/target",
    ]  # fmt: skip
    assert driver["command"] == [*worker["command"], "--exclude", "*.safetensors"]
    assert {"name": "HF_HUB_OFFLINE", "value": "0"} in worker["env"], "the image says 1"
    both = _workers(render(DEPLOYMENTS["download-with-drafter"]))["template"]["spec"]["initContainers"]
    assert [container["command"][2] for container in both] == [
        "google/gemma-4-31b-it",
        "google/gemma-4-31b-it-assistant",
    ]
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert token in worker["env"]


@pytest.mark.parametrize(
    ("name", "secret"), [("default", "made"), ("own-ray-token", "ray-token"), ("no-ray-token", None)]
)
def test_driver_shares_the_token_of_ray(name: str, secret: str | None) -> None:
    manifests = render(DEPLOYMENTS[name])
    cluster = pick(manifests, "RayCluster")
    env = {entry["name"]: entry for entry in _driver(manifests)["spec"]["containers"][0]["env"]}
    assert env["RAY_AUTH_MODE"]["value"] == cluster["spec"]["authOptions"]["mode"]
    if secret is None:
        assert "RAY_AUTH_TOKEN" not in env
        return
    # The operator makes a Secret named after the cluster unless it is told another name.
    named = cluster["spec"]["authOptions"].get("secretName", cluster["metadata"]["name"])
    assert secret in ("made", named)
    assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": named, "key": "auth_token"}


def test_probes_mean_warm_able_and_alive() -> None:
    container = _driver(render())["spec"]["containers"][0]
    assert container["startupProbe"]["grpc"] == {"port": 50051, "service": "gemray.v1.GenerationService"}
    assert container["readinessProbe"]["grpc"] == {"port": 50051, "service": "gemray.v1.GenerationService"}
    assert container["livenessProbe"]["grpc"] == {"port": 50051, "service": "gemray.liveness"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800, "weights of 60 GB may take half an hour"


def test_probes_speak_tls_where_the_port_does() -> None:
    container = _driver(render(DEPLOYMENTS["tls"]))["spec"]["containers"][0]
    for probe, service in (
        ("startupProbe", "gemray.v1.GenerationService"),
        ("readinessProbe", "gemray.v1.GenerationService"),
        ("livenessProbe", "gemray.liveness"),
    ):
        assert "grpc" not in container[probe], "the kubelet's own probe knows no TLS"
        assert f"--service={service}" in container[probe]["exec"]["command"]
        assert "--tls-name=gemray.example" in container[probe]["exec"]["command"]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_selectors_find_their_pods(name: str) -> None:
    manifests = render(DEPLOYMENTS[name])
    cluster = pick(manifests, "RayCluster")
    pods = {
        "driver": _driver(manifests)["metadata"]["labels"],
        "head": cluster["spec"]["headGroupSpec"]["template"]["metadata"]["labels"],
        "worker": _workers(manifests)["template"]["metadata"]["labels"],
        "test": pick(manifests, "Pod")["metadata"]["labels"],
    }
    if "openai" in ALL[name]:
        gateway = pick(manifests, "Deployment", "-openai")["spec"]
        pods["openai"] = gateway["template"]["metadata"]["labels"]
        assert _selected(gateway["selector"]["matchLabels"], pods) == {"openai"}
        assert _selected(pick(manifests, "Service", "-openai")["spec"]["selector"], pods) == {"openai"}
    assert _selected(pick(manifests, "Service")["spec"]["selector"], pods) == {"driver"}
    assert _selected(pick(manifests, "Deployment")["spec"]["selector"]["matchLabels"], pods) == {"driver"}
    for budget in (m for m in manifests if m["kind"] == "PodDisruptionBudget"):
        component = budget["metadata"]["name"].rpartition("-")[2]
        assert _selected(budget["spec"]["selector"]["matchLabels"], pods) == {component}
    for policy in (m for m in manifests if m["kind"] == "NetworkPolicy"):
        found = _matched(policy["spec"]["podSelector"], pods)
        component = policy["metadata"]["name"].rpartition("-")[2]
        assert found == ({"driver", "head", "worker"} if component == "internal" else {component})
    # The operator selects the head by its own value of this label.
    for component in ("head", "worker"):
        assert "app.kubernetes.io/name" not in pods[component]


def test_only_the_listed_peers_reach_the_driver() -> None:
    manifests = render(DEPLOYMENTS["closed-network"])
    policy = pick(manifests, "NetworkPolicy", "-driver")
    by_port = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["spec"]["ingress"]}
    values = DEPLOYMENTS["closed-network"]["networkPolicy"]
    own = by_port["grpc"].pop()
    assert by_port == {"grpc": values["clients"], "metrics": values["scrapers"]}
    # The clients of this release are let in without being listed, or `helm test` could not succeed.
    pods = {"test": pick(manifests, "Pod")["metadata"]["labels"], "driver": _driver(manifests)["metadata"]["labels"]}
    assert _matched(own["podSelector"], pods) == {"test"}


def test_the_pods_of_an_existing_cluster_reach_the_drivers() -> None:
    """They are nodes of the same Ray, and have labels of their own."""
    (rule,) = pick(render(ALL["existing-cluster"]), "NetworkPolicy", "-internal")["spec"]["ingress"]
    # As the operator labels them.
    pods = {"theirs": {"ray.io/cluster": "shared", "ray.io/node-type": "worker"}, "other": {"ray.io/cluster": "other"}}
    assert [_matched(peer["podSelector"], pods) for peer in rule["from"]] == [set(), {"theirs"}]


def test_workers_on_the_network_of_their_node_reach_head_and_drivers() -> None:
    (rule,) = pick(render(ALL["host-network"]), "NetworkPolicy", "-internal")["spec"]["ingress"]
    assert rule["from"][1:] == [{"ipBlock": {"cidr": "10.0.0.0/16"}}]


def test_two_releases_share_no_name() -> None:
    names = [
        {(m["kind"], m["metadata"]["name"]) for m in render(DEPLOYMENTS["monitoring"], release=release)}
        for release in ("one", "two")
    ]
    assert names[0] & names[1] == set()


def test_monitoring_scrapes_the_metrics_port() -> None:
    manifests = render(DEPLOYMENTS["monitoring"])
    monitor = pick(manifests, "ServiceMonitor")
    service = pick(manifests, "Service")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert set(monitor["spec"]) == {"selector", "endpoints"}
    assert monitor["spec"]["endpoints"] == [{"port": "metrics", "interval": "15s"}]
    assert "metrics" in {port["name"] for port in service["spec"]["ports"]}
    dashboard = pick(manifests, "ConfigMap")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["gemray.json"])["title"] == "gemray"


def _matched(selector: Manifest, pods: dict[str, Any]) -> set[str]:
    """Pods with these labels that a LabelSelector selects."""
    expressions = selector.get("matchExpressions", [])
    assert {expression["operator"] for expression in expressions} <= {"In"}
    return {
        name
        for name in _selected(selector.get("matchLabels", {}), pods)
        if all(pods[name].get(expression["key"]) in expression["values"] for expression in expressions)
    }


def _selected(selector: dict[str, str], pods: dict[str, Any]) -> set[str]:
    return {name for name, labels in pods.items() if selector.items() <= labels.items()}
