"""`ray up` for real: the shipped on-premise file on two throw-away hosts, TP=2 across them, a client outside."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.cluster.ray_turns import NOT_UP, TRIES, rays_turn
from support.deployment.commands import commands_run_by
from support.deployment.helm_chart import ROOT
from support.deployment.namespace_hosts import Host, Hosts, namespace_hosts, ssh, why_impossible
from support.waiting import HANG_S

ONPREM = ROOT / "cluster" / "ray-up" / "onprem.yaml"
BIN = sysconfig.get_path("scripts")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TRIES * HANG_S)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_impossible():
        pytest.skip(reason)
    with namespace_hosts(tmp_path, ("head", "worker"), path=BIN) as made:
        yield made


def _edited(hosts: Hosts, folder: Path) -> Path:
    """The shipped file with the edits that its comments ask for, and one CPU a host in place of GPUs."""
    head, worker = hosts.hosts
    model = write_servable_checkpoint(folder / "model")
    text = ONPREM.read_text()
    for shipped, edited in (
        ("192.168.1.10 ", f"{head.address} "),
        ("[192.168.1.11, 192.168.1.12]", f"[{worker.address}]"),
        ("ssh_user: gemray", "ssh_user: root"),
        ("~/.ssh/id_ed25519", str(hosts.private_key)),
        ("_workers: 2", "_workers: 1"),
        ("/models/gemma-4-31b-it", str(model)),
        ("--device cuda", "--device cpu --max-model-len 256"),  # random weights may never stop
        ("ray start --head", "ray start --num-cpus=1 --head"),
        ("ray start --address", "ray start --num-cpus=1 --address"),
    ):
        assert shipped in text, shipped
        text = text.replace(shipped, edited)
    file = folder / "onprem.yaml"
    file.write_text(text)
    return file


def test_up_serve_generate_down(hosts: Hosts, tmp_path: Path) -> None:
    """The commands of docs/deploy.md, in their order, from a machine that is no part of the cluster."""
    head, worker = hosts.hosts
    file = _edited(hosts, tmp_path)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "GEMRAY_"))}
    environment["PATH"] = f"{BIN}:{os.environ['PATH']}"
    outputs: dict[str, str] = {}
    for documented in commands_run_by(Path(__file__).name):
        if documented.startswith("export "):
            name, _, value = documented.removeprefix("export ").partition("=")
            environment[name] = value
            continue
        command = documented.replace("cluster/ray-up/onprem.yaml", str(file)).replace("HEAD", head.address)
        if documented.startswith("ray down"):
            _ranks_are_on_both(hosts)
            _strangers_are_refused(hosts, worker)
        done = _bash(command, tmp_path, environment)
        for _ in range(TRIES - 1):
            if NOT_UP in done.stdout + done.stderr:  # too slow a machine at that time: `ray up` begins anew
                done = _bash(command, tmp_path, environment)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        outputs[documented.split(" --")[0]] = done.stdout + done.stderr
        if documented.startswith("ray up"):
            _wait_until_ready(head.home / "gemray.log")
    assert "ready: serving" in outputs['ray exec cluster/ray-up/onprem.yaml "tail -n 100 gemray.log"']
    assert re.search(r"\d+ prompt \+ \d+ tokens", outputs["gemray generate"])
    assert "raylet" not in ssh(hosts, head, "ps ax -o args").stdout


def _bash(command: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    with rays_turn() if command.startswith("ray up") else nullcontext():
        return subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_S,
        )


def _ranks_are_on_both(hosts: Hosts) -> None:
    for host in hosts.hosts:
        ranks = ssh(hosts, host, "pgrep -fc RankWorker || true")
        assert int(ranks.stdout) >= 1, f"no rank on {host.name}"


def _strangers_are_refused(hosts: Hosts, worker: Host) -> None:
    head = hosts.hosts[0].address
    status = ssh(hosts, worker, f"RAY_AUTH_MODE=disabled {BIN}/ray status --address {head}:6379")
    assert status.returncode != 0


def _wait_until_ready(log: Path) -> None:
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        text = log.read_text() if log.exists() else ""
        if "ready: serving" in text:
            return
        assert "error:" not in text, text
        time.sleep(0.5)
    raise AssertionError(f"not ready within {HANG_S:g} s:\n{text}")


def test_hosts_leave_nothing_behind_when_a_test_fails(tmp_path: Path) -> None:
    if reason := why_impossible():
        pytest.skip(reason)

    def network() -> set[str]:
        listed = [
            subprocess.run(["ip", "-o", *what], capture_output=True, text=True, check=True)
            for what in (["link"], ["netns", "list"])
        ]
        return {name for done in listed for name in re.findall(r"\bgr\d[\w-]*", done.stdout)}

    before = network()
    mark = f"987{os.getpid()}"

    def work_and_fail() -> None:
        with namespace_hosts(tmp_path, ("one", "two"), path=BIN) as hosts:
            started = ssh(hosts, hosts.hosts[0], f"nohup sleep {mark} >/dev/null 2>&1 & echo started")
            assert "started" in started.stdout
            assert network() > before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work_and_fail()
    assert network() - before == set()
    until = time.monotonic() + HANG_S
    while [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]:
        assert time.monotonic() < until, "a process outlived its host"
        time.sleep(0.1)
