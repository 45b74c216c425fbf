"""The driver's container command, executed for real: flags in the chart cannot rot, and the probes mean what they say.

The pod's own network, files and Ray head are stood in for by loopback, a temporary directory and a local head.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gemray.v1 import generation_pb2 as pb
from gemray.v1 import generation_pb2_grpc
from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.cluster.ray_patience import RAY_PATIENCE
from support.cluster.ray_turns import rays_turn
from support.deployment.chart_values import DEPLOYMENTS
from support.deployment.helm_chart import driver_arguments, driver_settings, pick, render
from support.waiting import HANG_S

BIN = sysconfig.get_path("scripts")
HEAD = "127.0.0.1"
WORKER_PRE_STOP = pick(render(), "RayCluster")["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0][
    "lifecycle"
]["preStop"]["exec"]["command"][2]
RANK = re.compile(WORKER_PRE_STOP.split("'")[1])
"""What a worker's preStop hook waits for, as a rank's process calls itself."""
SERVING, NOT_SERVING = "SERVING", "NOT_SERVING"


def _driver(values: dict[str, Any]) -> dict[str, Any]:
    (container,) = pick(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(container)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_arguments_are_settings_of_gemray(name: str) -> None:
    manifests = render(DEPLOYMENTS[name])
    assert driver_arguments(manifests)[:2] == ["gemray", "serve"]
    settings = driver_settings(manifests)
    settings.server_config()
    settings.cluster_config()
    settings.engine_config("cpu" if settings.device == "cpu" else "cuda")


@dataclass
class Pod:
    """A container of the chart, running."""

    process: subprocess.Popen[bytes]
    container: dict[str, Any]
    port: int
    log: Path
    descendants: set[psutil.Process]

    def probe(self, name: str) -> str:
        """What the kubelet would get for startupProbe, readinessProbe or livenessProbe."""
        asked = self.container[name]["grpc"]
        assert asked["port"] == self.port
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=asked["service"]),
                    timeout=HANG_S,  # not the kubelet's, who has a machine to itself
                )
            except grpc.RpcError as error:
                return error.code().name
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs in the pod, raylet and ranks included: they stay in its session environment."""
        mark = f"GEMRAY_TEST_POD={self.log}"
        found = []
        for process in psutil.process_iter(["pid"]):
            try:
                if mark in (f"{key}={value}" for key, value in process.environ().items()):
                    found.append(process)
            except psutil.Error:
                continue
        return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def short_path() -> Iterator[Path]:
    """Ray's sockets live below it, and a socket's path has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="pod") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, short_path: Path) -> Iterator[Pod]:
    """One for all tests that need it: it serves at the end of each but the last, which stops it."""
    tmp_path = tmp_path_factory.mktemp("pod")
    ports = {name: _free_port() for name in ("ray", "grpc", "metrics")}
    values = {
        "gang": {"device": "cpu", "tensorParallelSize": 2},
        "server": {
            "dtype": "float32",
            "port": ports["grpc"],
            "kvMemory": "64MiB",
            "terminationGracePeriodSeconds": int(HANG_S),
        },
        "metrics": {"port": ports["metrics"]},
        "model": {"path": f"{tmp_path}/model", "volume": {"mountPath": str(tmp_path)}},
        "ray": {"objectStoreMemory": 80_000_000, "auth": {"mode": "token"}},
    }
    write_servable_checkpoint(tmp_path / "model")
    container = _driver(values)
    log = tmp_path / "log"
    environment = {
        "PATH": f"{BIN}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "GEMRAY_TEST_POD": str(log),
        "RAY_TMPDIR": str(short_path),
        **RAY_PATIENCE,
        **_environment_of(container, pod_ip=HEAD),
        "RAY_HEAD": f"{HEAD}:{ports['ray']}",
    }
    address = f"--address={environment['RAY_HEAD']}"
    command = [*container["command"], *container["args"]]
    command = [address if part.startswith("--address=") else part for part in command]
    head = ["ray", "start", "--head", f"--port={ports['ray']}", f"--node-ip-address={HEAD}", "--num-cpus=2"]
    with log.open("wb") as output:
        # The chart's head and workers, in one: CPUs for two ranks.
        with rays_turn():
            started = subprocess.run(
                [Path(BIN) / head[0], *head[1:], "--object-store-memory=80000000", "--include-dashboard=false"],
                env=environment,
                stdout=output,
                stderr=output,
                check=False,
                timeout=HANG_S,
            )
        assert started.returncode == 0, log.read_text()
        process = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    made = Pod(process, container, ports["grpc"], log, set())
    try:
        yield made
    finally:
        for left in made.processes():
            left.kill()
        process.wait()


def _environment_of(container: dict[str, Any], *, pod_ip: str) -> dict[str, str]:
    """The container's environment, with what Kubernetes would fill in."""
    filled = {"RAY_AUTH_TOKEN": "token-of-the-test-0123456789", "POD_IP": pod_ip}
    return {entry["name"]: entry.get("value", filled.get(entry["name"], "")) for entry in container["env"]}


@pytest.mark.slow
def test_driver_from_start_through_a_dead_rank(pod: Pod) -> None:
    seen = _watch_until(lambda: pod.probe("readinessProbe") == SERVING, pod)
    # During the load: alive, not ready; nothing else, and never ready before it can generate.
    assert {("startupProbe", NOT_SERVING), ("livenessProbe", SERVING)} <= seen
    assert ("livenessProbe", NOT_SERVING) not in seen

    # Ready means that a request is answered now.
    with grpc.insecure_channel(f"127.0.0.1:{pod.port}") as channel:
        request = pb.GenerateRequest(text="warm", sampling=pb.SamplingParameters(max_tokens=4, ignore_eos=True))
        answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=HANG_S)
        assert len(answer.token_ids) == 4
    assert [pod.probe(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")] == [SERVING] * 3

    # A dead rank: not ready until another gang is, and alive all along, so that nothing restarts the container.
    rank = next(process for process in pod.processes() if RANK.search(" ".join(process.cmdline())))
    assert not RANK.search(WORKER_PRE_STOP), "a worker would wait for its own hook"
    rank.kill()
    _watch_until(lambda: pod.probe("readinessProbe") != SERVING, pod)
    seen = _watch_until(lambda: pod.probe("readinessProbe") == SERVING, pod)
    assert {answer for name, answer in seen if name == "livenessProbe"} <= {SERVING}
    with grpc.insecure_channel(f"127.0.0.1:{pod.port}") as channel:
        again = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=HANG_S)
        assert len(again.token_ids) == 4


@pytest.mark.slow
def test_a_stopped_driver_lets_its_requests_finish(pod: Pod) -> None:
    _watch_until(lambda: pod.probe("readinessProbe") == SERVING, pod)
    with grpc.insecure_channel(f"127.0.0.1:{pod.port}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        sampling = pb.SamplingParameters(max_tokens=100, ignore_eos=True)
        stream = stub.GenerateStream(pb.GenerateStreamRequest(text="drain", sampling=sampling), timeout=HANG_S)
        messages = [next(stream)]
        pod.process.send_signal(signal.SIGTERM)  # as the kubelet does
        messages += stream
    assert messages[-1].final.finish_reason == pb.FINISH_REASON_LENGTH
    assert pod.process.wait(timeout=HANG_S) == 0, pod.log.read_text()


def _watch_until(done: Callable[[], bool], pod: Pod) -> set[tuple[str, str]]:
    """Probe until `done`; what the probes answered before that."""
    seen = set()
    until = time.monotonic() + HANG_S
    while not done():
        seen |= {(name, pod.probe(name)) for name in ("startupProbe", "livenessProbe")}
        assert time.monotonic() < until, f"not within {HANG_S:g} s: {seen}\n{pod.log.read_text()}"
        assert pod.process.poll() is None, pod.log.read_text()
        time.sleep(0.2)
    return seen
