"""The shipped `ray up` files pass Ray's own validation and hold what field reports say is forgotten."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from gemray_cluster.settings.settings import ServeSettings
from support.deployment.commands import serve_flags_in
from support.deployment.helm_chart import ROOT

FOLDER = ROOT / "cluster" / "ray-up"
FILES = sorted(FOLDER.glob("*.yaml"))


def _load(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_passes_rays_schema(path: Path) -> None:
    validate_config(prepare_config(_load(path)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_ray_process_has_the_token(path: Path) -> None:
    config = _load(path)
    assert next(iter(config["file_mounts"])) == "~/.ray/auth_token"
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    starts = [command for command in commands if "ray start" in command or "gemray serve" in command]
    assert len(starts) == 3
    assert [command for command in starts if "export RAY_AUTH_MODE=token" not in command] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_serve_command_is_one_that_gemray_takes(path: Path) -> None:
    (command,) = [c for c in _load(path)["head_start_ray_commands"] if "gemray serve" in c]
    settings = ServeSettings.load(serve_flags_in(command), {})
    assert settings.address == "auto"
    assert settings.device == "cuda", "the head has no GPU to infer it from, and the workers join later"
    settings.server_config()
    settings.cluster_config()
    settings.engine_config("cuda")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nobody_is_served_without_a_token(path: Path) -> None:
    config = _load(path)
    (command,) = [c for c in config["head_start_ray_commands"] if "gemray serve" in c]
    flags = serve_flags_in(command)
    assert flags["host"] == "127.0.0.1" or flags["auth_token_file"] in config["file_mounts"]
    assert flags["host"] == "127.0.0.1" or "metrics_port" not in flags, "metrics know no token"


def test_on_premise_avoids_the_autoscaler_that_never_starts_its_workers() -> None:
    text = (FOLDER / "onprem.yaml").read_text()
    assert "export RAY_UP_enable_autoscaler_v2=0" in text
    (start,) = [c for c in _load(FOLDER / "onprem.yaml")["head_start_ray_commands"] if "ray start" in c]
    assert "RAY_enable_autoscaler_v2=0" in start


def test_cloud_containers_share_memory_and_network_with_their_host() -> None:
    config = _load(FOLDER / "aws.yaml")
    options = config["docker"]["run_options"]
    assert {"--ipc=host", "--network=host"} <= set(options)
    assert "--gpus all" in config["docker"]["worker_run_options"]
    assert config["available_node_types"]["gang"]["resources"]["GPU"] >= 2


def test_weights_are_downloaded_where_ranks_run() -> None:
    config = _load(FOLDER / "aws.yaml")
    (everywhere,) = [c for c in config["initialization_commands"] if "s3 sync" in c]
    gang = config["available_node_types"]["gang"]
    (workers,) = [c for c in gang["initialization_commands"] if "s3 sync" in c]
    assert everywhere.replace(' --exclude "*.safetensors"', "") == workers != everywhere
    assert "IamInstanceProfile" in gang["node_config"], "Ray gives workers none, and the bucket asks for one"
    assert "s3:GetObject" in (FOLDER / "aws.yaml").read_text()


def test_a_node_needs_docker_alone_to_get_the_model(tmp_path: Path) -> None:
    """Ubuntu has no AWS CLI: the commands run with a PATH that has docker, one that writes down what it is told."""
    config = _load(FOLDER / "aws.yaml")
    told = tmp_path / "told"
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {told}\n')
    docker.chmod(0o755)
    (tmp_path / "id").symlink_to("/usr/bin/id")
    for commands in (
        config["initialization_commands"],
        config["available_node_types"]["gang"]["initialization_commands"],
    ):
        (command,) = [c for c in commands if "s3 sync" in c]
        subprocess.run(["/bin/bash", "-c", command], env={"PATH": str(tmp_path)}, check=True)
        words = told.read_text().splitlines()
        options, aws = words[: words.index("s3")], words[words.index("s3") :]
        assert aws[:2] == ["s3", "sync"]
        assert aws[-1].startswith("/models/")
        assert options[options.index("-v") + 1] == "/models:/models"
        assert options[options.index("--network") + 1] == "host", "a bridge is one hop too far from the instance's role"
        assert options[options.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}", (
            "root's files would be in the way"
        )


def test_systemd_drains_the_server_before_it_kills() -> None:
    lines = (ROOT / "cluster" / "systemd" / "gemray.service").read_text().splitlines()
    unit = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    settings = ServeSettings.load(serve_flags_in(unit["ExecStart"]), {})
    assert unit["KillMode"] == "mixed", "Ray must outlive the drain"
    assert unit["RestartPreventExitStatus"].split() == ["2", "5", "130"], "an end that was asked for is one"
    assert float(unit["TimeoutStopSec"]) > settings.server_config().drain_deadline_s + 30
    assert settings.server_config().host == "127.0.0.1"
