"""What single values of the chart do to the manifests."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from gemray_cluster.gang.scaling import ReplicaLimits
from support.deployment.chart_values import DEPLOYMENTS
from support.deployment.helm_chart import (
    driver_arguments,
    driver_pod,
    driver_settings,
    head_pod,
    pick,
    render,
    worker_pod,
)


def _env(pod: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}


@pytest.mark.parametrize(
    ("values", "driver", "worker"),
    [
        ({}, 1, 0),
        ({"gang": {"replicas": 3}}, 1, 2),
        ({"gang": {"replicas": 2, "tensorParallelSize": 16, "multiHost": True}}, 1, 3),
        ({"gang": {"replicas": 3}, "podDisruptionBudget": {"maxUnavailable": 0}}, 0, 3),
        (DEPLOYMENTS["dedicated-drafter-apart"], 1, 3),
        (DEPLOYMENTS["hpa"], 1, 1),
        (DEPLOYMENTS["router"], 1, 3),
        (DEPLOYMENTS["router-that-scales"], 1, 0),
    ],
)
def test_budgets_let_a_node_drain(values: dict[str, Any], driver: int, worker: int) -> None:
    """Drivers may leave one by one, however many there are.

    For workers, whose owner has no scale, the eviction API takes an integer minAvailable and nothing else.
    """
    manifests = render(values)
    budgets = [pick(manifests, "PodDisruptionBudget", f"-{kind}")["spec"] for kind in ("driver", "worker")]
    for budget in budgets:
        del budget["selector"]
    assert budgets == [{"maxUnavailable": driver}, {"minAvailable": worker}]


def test_large_numbers_of_a_flag_are_whole() -> None:
    """Helm has 1e+06 for a million of a values file."""
    values = {"drafter": {"path": "/models/drafter", "draftTokens": 1_000_000}, "server": {"maxModelLen": 2_000_000}}
    arguments = driver_arguments(render(values))
    assert {"--draft-tokens=1000000", "--max-model-len=2000000"} < set(arguments)


def test_ends_within_the_grace_period_are_taken() -> None:
    values = {"server": {"extraArgs": ["--drain-notice-s=45", "--stop-deadline-s", "55"]}}
    assert driver_arguments(render(values))[-3:] == values["server"]["extraArgs"]


@pytest.mark.parametrize("address", ["redis:6379", "rediss://redis.databases.svc:6380", "[fd00::1]:6379", "10.0.0.7:1"])
def test_addresses_of_redis_are_taken(address: str) -> None:
    options = pick(render({"ray": {"gcsFaultTolerance": {"enabled": True, "redisAddress": address}}}), "RayCluster")[
        "spec"
    ]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == address


def test_an_ingress_takes_what_the_server_takes() -> None:
    """nginx refuses bodies above 1 MB unless it is told otherwise; the operator's own word counts more."""
    size = "nginx.ingress.kubernetes.io/proxy-body-size"
    for own, expected in (({}, "16m"), ({size: "64m"}, "64m")):
        values = {"ingress": {"enabled": True, "host": "gemray.example", "annotations": own}}
        assert pick(render(values), "Ingress")["metadata"]["annotations"][size] == expected


@pytest.mark.parametrize(
    ("service", "tls", "protocol"),
    [("", False, "kubernetes.io/h2c"), ("", True, "https"), ("HTTP2", True, "HTTP2"), ("grpc", False, "grpc")],
)
def test_gateways_are_told_how_to_speak(service: str, tls: bool, protocol: str) -> None:
    values = {**(DEPLOYMENTS["tls"] if tls else {}), "service": {"appProtocol": service}}
    assert pick(render(values), "Service")["spec"]["ports"][0]["appProtocol"] == protocol


def test_a_load_is_no_failure_as_long_as_its_probe_waits() -> None:
    """Kubernetes gives up a rollout without progress after ten minutes, and Helm and kubectl then fail with it."""
    deployment = pick(render(), "Deployment")["spec"]
    startup = deployment["template"]["spec"]["containers"][0]["startupProbe"]
    longest = startup["periodSeconds"] * startup["failureThreshold"]
    grace = deployment["template"]["spec"]["terminationGracePeriodSeconds"]
    assert deployment["progressDeadlineSeconds"] == longest + grace + 900


def test_a_digest_stands_for_the_tag() -> None:
    (container,) = driver_pod(render(DEPLOYMENTS["digest"]))["containers"]
    assert container["image"] == f"registry.example/gemray@sha256:{'0' * 64}"


def test_gcs_fault_tolerance_is_the_clusters_and_the_drivers_wait_for_the_head() -> None:
    manifests = render(DEPLOYMENTS["gcs-fault-tolerance"])
    assert pick(manifests, "RayCluster")["spec"]["gcsFaultToleranceOptions"] == {
        "backend": "redis",
        "redisAddress": "redis.databases.svc:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
    }
    for pod in (head_pod(manifests), worker_pod(manifests), driver_pod(manifests)):
        assert _env(pod)["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"


def test_an_existing_cluster_is_joined_and_none_is_made() -> None:
    manifests = render(DEPLOYMENTS["existing-cluster"])
    assert "RayCluster" not in {m["kind"] for m in manifests}
    assert _env(driver_pod(manifests))["RAY_HEAD"] == "shared-head-svc.serving.svc:6379"
    budgets = [m["metadata"]["name"] for m in manifests if m["kind"] == "PodDisruptionBudget"]
    assert budgets == ["demo-gemray-driver"]


def test_rdma_gives_workers_the_device() -> None:
    manifests = render(DEPLOYMENTS["rdma"])
    (container,) = worker_pod(manifests)["containers"]
    assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
    assert container["resources"]["requests"]["rdma/hca_shared_devices_a"] == 1
    assert _env(worker_pod(manifests))["NCCL_IB_HCA"] == _env(driver_pod(manifests))["NCCL_IB_HCA"] == "mlx5"
    assert _env(worker_pod(manifests))["NCCL_BUFFSIZE"] == "4194304", "as NCCL reads a number"
    # A capability has no effect for a user that is not root, so none is added.
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(("limit", "code"), [("unlimited", 0), ("64", 1)])
def test_workers_say_where_a_node_cannot_pin_memory(limit: str, code: int) -> None:
    (check,) = worker_pod(render(DEPLOYMENTS["rdma"]))["initContainers"]
    assert check["command"][:2] == ["/bin/bash", "-c"]
    script = f"ulimit() {{ echo {limit}; }}\n{check['command'][2]}"
    ran = subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == code
    if code:
        assert "lock 64 KiB of memory" in ran.stderr
        assert "LimitMEMLOCK=infinity" in ran.stderr


def test_rdma_as_root_has_the_capability_that_only_root_can_use() -> None:
    manifests = render(DEPLOYMENTS["rdma-as-root"])
    assert "initContainers" not in worker_pod(manifests)
    security = worker_pod(manifests)["containers"][0]["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]},
        "runAsNonRoot": False,
        "runAsUser": 0,
    }
    assert "runAsUser" not in driver_pod(manifests)["containers"][0]["securityContext"]


def test_the_hosts_network_keeps_the_clusters_names() -> None:
    worker = worker_pod(render(DEPLOYMENTS["host-network"]))
    assert (worker["hostNetwork"], worker["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


@pytest.mark.parametrize("pod", [head_pod, worker_pod, driver_pod])
def test_extras_reach_every_kind_of_pod(pod: Any) -> None:
    spec = pod(render(DEPLOYMENTS["extras"]))
    assert {"name": "scratch", "emptyDir": {}} in spec["volumes"]
    assert {"name": "scratch", "mountPath": "/scratch"} in spec["containers"][0]["volumeMounts"]
    assert spec["topologySpreadConstraints"][0]["maxSkew"] == 1


def test_labels_reach_every_pod() -> None:
    manifests = render(DEPLOYMENTS["extras"])
    cluster = pick(manifests, "RayCluster")["spec"]
    templates = [
        pick(manifests, "Deployment")["spec"]["template"],
        cluster["headGroupSpec"]["template"],
        cluster["workerGroupSpecs"][0]["template"],
    ]
    assert {template["metadata"]["labels"]["team"] for template in templates} == {"serving"}


@pytest.mark.parametrize(("name", "age"), [("default", None), ("server-flags", 3600)])
def test_connections_end_at_the_age_that_is_set(name: str, age: float | None) -> None:
    assert driver_settings(render(DEPLOYMENTS[name])).server_config().max_connection_age_s == age


def test_a_driver_has_time_for_all_that_its_grace_period_holds() -> None:
    manifests = render({"server": {"terminationGracePeriodSeconds": 120, "preStopSeconds": 20}})
    pod, config = driver_pod(manifests), driver_settings(manifests).server_config()
    pre_stop = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert (pre_stop, config.drain_deadline_s) == (20, 90)
    assert pre_stop + config.drain_notice_s + config.drain_deadline_s < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("name", "drafters"),
    [
        ("default", ()),
        ("drafter", ("/models/drafter",)),
        ("two-drafters", ("/models/assistant", "/models/dflash")),
        ("download-two-drafters", ("/models/assistant", "/models/dflash")),
    ],
)
def test_a_driver_has_the_drafters_that_are_asked_for(name: str, drafters: tuple[str, ...]) -> None:
    manifests = render(DEPLOYMENTS[name])
    assert driver_settings(manifests).engine_config("cuda").drafter_paths == drafters
    if name.startswith("download"):
        for pod in (driver_pod(manifests), worker_pod(manifests)):
            directories = [init["command"][init["command"].index("--local-dir") + 1] for init in pod["initContainers"]]
            assert directories == ["/models/target", *drafters]


@pytest.mark.parametrize("name", ["default", "download-two-drafters", "download-into-a-claim"])
def test_a_checkpoint_has_one_path_however_it_is_written(name: str) -> None:
    values = DEPLOYMENTS[name]
    plain, winding = (
        render({**values, "model": {**values.get("model", {}), "path": path}})
        for path in ("/models/target", "/models//old/.././target/")
    )
    assert driver_settings(winding).model == driver_settings(plain).model
    assert worker_pod(winding).get("initContainers") == worker_pod(plain).get("initContainers")


def test_a_driver_logs_and_traces_as_it_is_told() -> None:
    config = driver_settings(render(DEPLOYMENTS["monitoring"])).server_config()
    assert (config.log_format, config.otlp_traces_endpoint) == ("json", "http://collector.monitoring:4317")


@pytest.mark.parametrize(
    ("name", "limits", "workers"),
    [
        ("default", ReplicaLimits(), (1, 1, 1)),
        ("router", ReplicaLimits(replicas=2, min_replicas=2, max_replicas=2), (4, 4, 4)),
        ("router-that-scales", ReplicaLimits(replicas=2, min_replicas=1, max_replicas=4), (None, 1, 4)),
    ],
)
def test_a_driver_finds_workers_for_all_its_gangs(
    name: str, limits: ReplicaLimits, workers: tuple[int | None, int, int]
) -> None:
    manifests = render(DEPLOYMENTS[name])
    assert driver_settings(manifests).replica_limits() == limits
    cluster = pick(manifests, "RayCluster")["spec"]
    (group,) = cluster["workerGroupSpecs"]
    assert (group.get("replicas"), group["minReplicas"], group["maxReplicas"]) == workers
    scales = workers[1] != workers[2]
    assert cluster.get("enableInTreeAutoscaling", False) is scales
    assert cluster["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"] is scales


@pytest.mark.parametrize(("name", "protocol"), [("default", "kubernetes.io/h2c"), ("tls", "https")])
def test_gateways_are_told_what_the_port_speaks(name: str, protocol: str) -> None:
    ports = {port["name"]: port for port in pick(render(DEPLOYMENTS[name]), "Service")["spec"]["ports"]}
    assert ports["grpc"]["appProtocol"] == protocol


def test_a_route_leads_to_the_service() -> None:
    manifests = render(DEPLOYMENTS["grpc-route"])
    route = pick(manifests, "GRPCRoute")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"] == {
        "parentRefs": [{"name": "public"}],
        "hostnames": ["gemray.example"],
        "rules": [{"backendRefs": [{"name": pick(manifests, "Service")["metadata"]["name"], "port": 50051}]}],
    }
    assert "BackendTLSPolicy" not in {m["kind"] for m in manifests}


@pytest.mark.parametrize(
    ("backend", "trusts"),
    [
        (
            {"caConfigMap": "authority"},
            {"caCertificateRefs": [{"group": "", "kind": "ConfigMap", "name": "authority"}]},
        ),
        ({"systemCAs": True}, {"wellKnownCACertificates": "System"}),
    ],
)
def test_a_gateway_speaks_tls_to_a_port_that_does(backend: dict[str, Any], trusts: dict[str, Any]) -> None:
    values = DEPLOYMENTS["grpc-route-to-tls"]
    manifests = render({**values, "gateway": {**values["gateway"], "backendTLS": backend}})
    policy, service = pick(manifests, "BackendTLSPolicy"), pick(manifests, "Service")
    assert policy["apiVersion"] == "gateway.networking.k8s.io/v1"
    (target,) = policy["spec"]["targetRefs"]
    assert target == {"group": "", "kind": "Service", "name": service["metadata"]["name"], "sectionName": "grpc"}
    assert target["sectionName"] in {port["name"] for port in service["spec"]["ports"]}
    assert policy["spec"]["validation"] == {"hostname": "gemray.example", **trusts}


@pytest.mark.parametrize(("name", "protocol"), [("ingress", "GRPC"), ("ingress-to-tls", "GRPCS")])
def test_an_ingress_speaks_grpc_to_the_service(name: str, protocol: str) -> None:
    manifests = render(DEPLOYMENTS[name])
    ingress = pick(manifests, "Ingress")
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/backend-protocol"] == protocol
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["name"] == pick(manifests, "Service")["metadata"]["name"]


def test_drivers_follow_the_load_and_workers_follow_the_drivers() -> None:
    manifests = render(DEPLOYMENTS["hpa"])
    scaler, deployment = pick(manifests, "HorizontalPodAutoscaler")["spec"], pick(manifests, "Deployment")
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "an upgrade would set the autoscaler's number back"
    cluster = pick(manifests, "RayCluster")["spec"]
    assert cluster["enableInTreeAutoscaling"]
    group = cluster["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["maxReplicas"]) == (2, 4) == (scaler["minReplicas"], scaler["maxReplicas"])
    assert head_pod(manifests)["automountServiceAccountToken"], "the autoscaler talks to Kubernetes"
    assert not head_pod(render())["automountServiceAccountToken"]


def test_keda_asks_prometheus() -> None:
    scaled = pick(render(DEPLOYMENTS["keda"]), "ScaledObject")["spec"]
    (trigger,) = scaled["triggers"]
    assert trigger["type"] == "prometheus"
    assert trigger["metadata"]["serverAddress"] == "http://prometheus:9090"
    assert trigger["metadata"]["query"].startswith("sum(gemray_requests_in_flight{")
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, 4)
    # KEDA's own cooldown counts for scaling to zero alone; the rest is the business of the HPA that it makes.
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    hpa = pick(render(DEPLOYMENTS["hpa"]), "HorizontalPodAutoscaler")["spec"]["behavior"]
    assert behavior == hpa == {"scaleDown": {"stabilizationWindowSeconds": 600}}
    assert "cooldownPeriod" not in scaled


@pytest.mark.parametrize(
    ("name", "volume"),
    [
        ("default", {"emptyDir": {"sizeLimit": "2Gi"}}),
        ("triton-cache-claim", {"persistentVolumeClaim": {"claimName": "kernels"}}),
        ("triton-cache-node", {"hostPath": {"path": "/var/cache/gemray", "type": "Directory"}}),
        ("no-triton-cache", None),
    ],
)
def test_compiled_kernels_are_kept(name: str, volume: dict[str, Any] | None) -> None:
    worker = worker_pod(render(DEPLOYMENTS[name]))
    found = [v for v in worker["volumes"] if v["name"] == "triton-cache"]
    assert found == ([] if volume is None else [{"name": "triton-cache", **volume}])
    mounts = {m["name"]: m["mountPath"] for m in worker["containers"][0]["volumeMounts"]}
    assert mounts.get("triton-cache") == _env(worker).get("TRITON_CACHE_DIR")


def test_quantities_are_read_as_people_write_them() -> None:
    manifests = render(DEPLOYMENTS["quantities"])
    cluster = pick(manifests, "RayCluster")["spec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["object-store-memory"] == str(512 << 20)
    assert "--kv-memory=40Gi" in driver_arguments(manifests)
    assert _env(driver_pod(render()))["RAY_OBJECT_STORE_MEMORY"] == str(256 << 20)
    in_bytes = render({"ray": {"objectStoreMemory": 268435456}})
    assert _env(driver_pod(in_bytes))["RAY_OBJECT_STORE_MEMORY"] == str(256 << 20)


def test_cpus_get_a_dtype_that_fits() -> None:
    assert "--dtype=auto" in driver_arguments(render(DEPLOYMENTS["cpu-by-itself"]))


@pytest.mark.parametrize(
    ("connections", "waits"),
    [
        ([], False),
        (["0100A8C0:18EB 0100A8C0:D431 01"], False),  # the head's own raylet
        (["0100A8C0:18EB 0200A8C0:D431 06"], False),  # gone, in TIME_WAIT
        (["0100A8C0:1F90 0200A8C0:D431 01"], False),  # another port
        (["0100A8C0:18EB 0100A8C0:D431 01", "0100A8C0:18EB 0200A8C0:D431 01"], True),  # a driver's raylet
    ],
)
def test_a_head_waits_for_those_who_are_connected(connections: list[str], waits: bool, tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    header = "  sl  local_address rem_address   st tx_queue rx_queue"
    table.write_text("\n".join([header, *(f"   {n}: {line} 0" for n, line in enumerate(connections))]) + "\n")
    (container,) = head_pod(render())["containers"]
    hook = container["lifecycle"]["preStop"]["exec"]["command"][2]
    condition = hook.removeprefix("while ").partition("; do ")[0].replace("/proc/net/tcp /proc/net/tcp6", str(table))
    assert (subprocess.run(["bash", "-c", condition], check=False).returncode == 0) is waits
