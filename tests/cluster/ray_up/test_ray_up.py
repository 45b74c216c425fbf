"""`ray up` for real: the shipped on-premise file on two throw-away hosts, TP=2 across them, a client outside."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemray_cluster.demo_checkpoint import write_demo_checkpoint
from support.helm_chart import ROOT
from support.namespace_hosts import Hosts, namespace_hosts, ssh, why_impossible

ONPREM = ROOT / "cluster" / "ray-up" / "onprem.yaml"
BIN = sysconfig.get_path("scripts")
READY_DEADLINE_S = 150.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_impossible():
        pytest.skip(reason)
    with namespace_hosts(tmp_path, ("head", "worker"), path=BIN) as made:
        yield made


def _edited(hosts: Hosts, folder: Path) -> dict[str, Any]:
    """The shipped file with the edits that its comments ask for, and one CPU slot a host in place of GPUs."""
    head, worker = hosts.hosts
    model = write_demo_checkpoint(folder / "model")
    token = folder / "ray_token"
    token.write_text(secrets.token_hex(32))
    text = ONPREM.read_text()
    for shipped, edited in (
        ("192.168.1.10 ", f"{head.address} "),
        ("[192.168.1.11, 192.168.1.12]", f"[{worker.address}]"),
        ("ssh_user: gemray", "ssh_user: root"),
        ("~/.ssh/id_ed25519", str(hosts.private_key)),
        ("_workers: 2", "_workers: 1"),
        ("./ray_token", str(token)),
        ("/models/gemma-4-31b-it", str(model)),
        ("--device cuda", "--device cpu"),
        ("ray start --head", "ray start --num-cpus=1 --head"),
        ("ray start --address", "ray start --num-cpus=1 --address"),
    ):
        assert shipped in text, shipped
        text = text.replace(shipped, edited)
    return dict(yaml.safe_load(text))


def _run(*command: str, timeout_s: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "GEMRAY_"))}
    return subprocess.run(
        [str(Path(BIN) / command[0]), *command[1:]],
        env={**inherited, "PATH": f"{BIN}:{os.environ['PATH']}", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def test_up_serve_generate_down(hosts: Hosts, tmp_path: Path) -> None:
    head, worker = hosts.hosts
    file = tmp_path / "onprem.yaml"
    file.write_text(yaml.safe_dump(_edited(hosts, tmp_path)))
    up = _run("ray", "up", str(file), "-y", "--no-config-cache", RAY_UP_enable_autoscaler_v2="0")
    assert up.returncode == 0, up.stdout + up.stderr

    log = head.home / "gemray.log"
    _wait_until_ready(log)
    stages = log.read_text()
    assert "loading the model" in stages

    # Two ranks on two hosts: each host has one slot. The client is on neither.
    server = f"{head.address}:50051"
    shown = _run("gemray", "info", "--address", server)
    assert shown.returncode == 0, shown.stderr
    answers = [
        _run("gemray", "generate", "--address", server, "--max-tokens=12", "--seed=7", *stream, "Once upon a time")
        for stream in ([], ["--stream"])
    ]
    for answer in answers:
        assert answer.returncode == 0, answer.stderr
        assert "12 tokens" in answer.stderr
    assert answers[0].stdout == answers[1].stdout

    for host in hosts.hosts:
        ranks = ssh(hosts, host, "pgrep -fc RankActor || true")
        assert int(ranks.stdout) >= 1, f"no rank on {host.name}"

    # The token is asked for: without it Ray's head answers nobody.
    status = ssh(hosts, worker, f"RAY_AUTH_MODE=disabled {BIN}/ray status --address {head.address}:6379")
    assert status.returncode != 0

    down = _run("ray", "down", str(file), "-y", RAY_UP_enable_autoscaler_v2="0")
    assert down.returncode == 0, down.stdout + down.stderr
    assert "raylet" not in ssh(hosts, head, "ps ax -o args").stdout


def _wait_until_ready(log: Path) -> None:
    until = time.monotonic() + READY_DEADLINE_S
    while time.monotonic() < until:
        text = log.read_text() if log.exists() else ""
        if "ready: serving" in text:
            return
        assert "error:" not in text, text
        time.sleep(0.5)
    raise AssertionError(f"not ready within {READY_DEADLINE_S:g} s:\n{text}")


def test_python_of_the_hosts_is_this_one() -> None:
    """The login shells of the hosts find gemray and ray where the tests do."""
    assert Path(BIN, "gemray").exists()
    assert Path(BIN, "python").resolve() == Path(sys.executable).resolve()
