"""docs/deploy.md: every command is run by a test or says what it needs, and what it says of series is so."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest

from support.checkpoints.servable_checkpoint import write_servable_checkpoint
from support.cluster.series import all_names
from support.deployment.commands import DEPLOY_DOC, blocks_of, commands_run_by
from support.deployment.helm_chart import ROOT, helm_binary
from support.waiting import HANG_S

BIN = sysconfig.get_path("scripts")
HERE = Path(__file__).name
MAKE = {"make demo", ". .venv/bin/activate"}
"""`make` builds the environment that all tests run in; the demo has a test of its own."""


def test_every_block_is_run_or_says_what_it_needs() -> None:
    blocks = blocks_of()
    assert len(blocks) == DEPLOY_DOC.read_text().count("```sh")
    assert [block.commands for block in blocks if block.key is None] == []
    for block in blocks:
        if block.value == "make":
            assert set(block.commands) == MAKE
        elif block.key == "run by":
            (test,) = (ROOT / "tests").rglob(str(block.value))
            assert "commands_run_by" in test.read_text()


def test_unrun_commands_name_flags_that_exist() -> None:
    """What needs a cluster or a cloud can still not rot: gemray's part of it is the same as in the blocks that run."""
    run = {command for block in blocks_of() if block.key == "run by" for command in block.commands}
    shapes = {re.sub(r"\S+:50051", "SERVER", command) for command in run}
    unrun = [command for block in blocks_of() if block.key == "needs" for command in block.commands]
    for command in unrun:
        if command.startswith("gemray "):
            assert re.sub(r"\S+:50051", "SERVER", command) in shapes
        if command.startswith("helm install "):
            values = command.split("--create-namespace ")[1]
            assert any(values in other for other in run if other.startswith("helm template ")), command


def test_series_are_those_of_the_server() -> None:
    documented = set(re.findall(r"`(gemray_\w+)(?:\{\w+\})?`", DEPLOY_DOC.read_text()))
    bare = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in all_names()}
    bare = {name for name in bare if name != "gemray_request"}
    assert documented == bare


@pytest.mark.slow
def test_commands_on_this_machine(tmp_path: Path) -> None:
    commands = [command for command in commands_run_by(HERE) if not command.startswith("helm ")]
    grpc_port, metrics_port = (_free_port() for _ in range(2))
    write_servable_checkpoint(tmp_path / "models" / "gemma-4-31b-it")
    script = []
    for command in commands:
        here = command.replace("50051", str(grpc_port)).replace("9400", str(metrics_port))
        script.append(here.removesuffix("&") + ">serve.log 2>&1 &" if here.endswith("&") else here)
        if here.endswith("&"):
            # What a reader does: look until it is ready.
            script.append(f"timeout {HANG_S:g} bash -c 'until grep -q ^ready: serve.log; do sleep 0.3; done'")
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*script, "wait %1"])],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    log = tmp_path / "serve.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    assert "gemray serve can start" in done.stdout
    assert re.search(r"gemray_request_total\{model=\"gemma-4-31b-it\",outcome=\"\w+\"\} 1", done.stdout)
    (line,) = [line for line in log.read_text().splitlines() if "request id=" in line]
    assert re.search(r"rpc=GenerateStream outcome=\w+ status=OK prompt_tokens=\d+ completion_tokens=\d+", line)
    assert "\r" not in log.read_text(), "progress bars are for terminals"


def test_helm_commands(tmp_path: Path) -> None:
    commands = [command for command in commands_run_by(HERE) if command.startswith("helm ")]
    assert len(commands) == 2
    (tmp_path / "helm").symlink_to(helm_binary(4))
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
