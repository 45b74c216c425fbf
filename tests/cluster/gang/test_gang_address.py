"""A gang on a cluster that was started elsewhere: found by address, closed without its token, growing while the gang
waits."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil
import pytest

from support.cluster.fake_worker import expected_token
from support.cluster.ray_patience import RAY_PATIENCE
from support.cluster.ray_turns import rays_turn
from support.waiting import HANG_S, eventually

STARTS = 5
"""Most starts of a node: usually the second comes up, for which everything has been read from disk."""
TESTS = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@dataclass
class PrivateCluster:
    """Ray nodes of this test alone: own port, own temporary directory, own token."""

    directory: Path
    port: int = field(default_factory=free_port)
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def environment(self, token: str = "a" * 64) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        return inherited | {
            **RAY_PATIENCE,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "HOME": str(self.directory),
            "PYTHONPATH": str(TESTS),
            "OMP_NUM_THREADS": "1",
        }

    def start_node(self, *arguments: str) -> None:
        """Start one and wait until it is up; one whose raylet ends as it begins is started again."""
        log = self.directory / f"node{len(self.nodes)}.log"
        with rays_turn():
            for _ in range(STARTS):
                node = self._start_node(log, *arguments)
                if _comes_up(node, log):
                    self.nodes.append(node)
                    return
                _end_session(node)
        raise AssertionError(f"a node has not come up {STARTS} times: {log.read_text()}")

    def _start_node(self, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        common = ["--num-cpus=1", "--num-gpus=0", "--object-store-memory=100000000", "--node-ip-address=127.0.0.1"]
        with log.open("wb") as file:
            return subprocess.Popen(
                [RAY, "start", "--block", "--disable-usage-stats", *common, *arguments],
                env=self.environment(),
                cwd=self.directory,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def drive(self, *arguments: str, token: str = "a" * 64) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "support.cluster.gang_driver", self.address, *arguments],
            env=self.environment(token),
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.send_signal(signal.SIGTERM)
        for node in reversed(self.nodes):
            with suppress(subprocess.TimeoutExpired):
                node.wait(5)
            _end_session(node)


def _comes_up(node: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether it does before it, or its raylet, has ended: for such a one ``ray start`` waits in vain."""
    until = time.monotonic() + HANG_S
    while time.monotonic() < until and node.poll() is None:
        if "Ray runtime started" in log.read_text():
            return True
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(node.pid).children(recursive=True)
            if any(child.name() == "raylet" and child.status() == psutil.STATUS_ZOMBIE for child in children):
                return False
        time.sleep(0.2)
    return False


def _end_session(node: subprocess.Popen[bytes]) -> None:
    """End the node's own session: what outlived it."""
    with suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateCluster]:
    """A head with one CPU."""
    directory = Path("/tmp") / f"gr{os.getpid()}"  # short: Ray puts sockets below it
    directory.mkdir()
    cluster = PrivateCluster(directory)
    cluster.start_node(
        "--head", f"--port={cluster.port}", f"--temp-dir={directory}/ray", "--include-dashboard=false",
        f"--ray-client-server-port={free_port()}",
    )  # fmt: skip
    yield cluster
    cluster.stop()
    subprocess.run(["rm", "-rf", str(directory)], check=True)


def result_of(driver: subprocess.Popen[str]) -> dict[str, object]:
    out, err = driver.communicate(timeout=HANG_S)
    assert driver.returncode == 0, err
    result: dict[str, object] = json.loads(out.strip().splitlines()[-1])
    return result


@pytest.mark.slow
def test_a_token_opens_the_cluster_and_a_node_that_joins_while_the_gang_waits_is_used(cluster: PrivateCluster) -> None:
    stranger = cluster.drive(token="b" * 64)  # meanwhile: Ray itself tries the wrong token for some twenty seconds
    driver = cluster.drive()
    assert driver.stderr is not None
    line = ""
    while "WAITING" not in line:
        line = driver.stderr.readline()
        assert line, f"the driver ended without waiting for resources: {driver.communicate()[0]}"
    cluster.start_node(f"--address={cluster.address}")
    result = result_of(driver)
    assert result["ids"] == [expected_token(5, p) for p in range(6)]
    (shortage,) = cast(list[str], result["waited_for"])
    assert re.fullmatch(r"wanted 2 x \{CPU: 1\}; available: node [0-9.]+ \{CPU: 1, GPU: 0\}", shortage)
    assert result["state"] == "stopped"

    refused = str(result_of(stranger)["error"])
    assert refused.startswith(f"ClusterUnreachable: cannot join the Ray cluster at {cluster.address}")
    assert "RAY_AUTH_MODE=token" in refused
    assert "token" in refused.rpartition(";")[2], "the hint says what else it may be"


@pytest.mark.slow
async def test_a_killed_driver_leaves_the_cluster_to_the_next_one(cluster: PrivateCluster) -> None:
    """Its ranks end at once, and Ray takes back their actors, their names and their placement group."""
    while len(cluster.nodes) < 2:
        cluster.start_node(f"--address={cluster.address}")
    driver = cluster.drive("stay")
    assert driver.stdout is not None
    ranks = [psutil.Process(pid) for pid in json.loads(driver.stdout.readline())["pids"]]
    driver.kill()
    driver.communicate()
    began = time.monotonic()
    await eventually(lambda: not any(rank.is_running() for rank in ranks))
    print(f"the ranks ended within {time.monotonic() - began:.2f} s of their driver")
    result = result_of(cluster.drive())
    assert result["ids"] == [expected_token(5, p) for p in range(6)]
    assert set(cast(list[str], result["groups"])) == {"REMOVED"}
