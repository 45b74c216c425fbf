"""The image: no engine builds it here, so its file is linted and its install step is run in a fresh environment."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from support.deployment.helm_chart import CHART, ROOT

DOCKERFILE = ROOT / "helm" / "docker" / "Dockerfile"


def _instructions(name: str) -> list[str]:
    """Arguments of every `name` instruction, continuation lines joined."""
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text())
    return [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith(f"{name} ")]


def test_lints() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    linted = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


def test_copies_exist_and_pass_the_ignore_file() -> None:
    allowed = {
        line[1:] for line in DOCKERFILE.with_suffix(".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    sources = {source for copy in _instructions("COPY") for source in shlex.split(copy)[:-1]}
    assert sources == allowed
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_what_follows_the_image_is_a_command_of_gemray() -> None:
    assert (_instructions("ENTRYPOINT"), _instructions("CMD")) == (['["gemray"]'], ['["--help"]'])
    options = yaml.safe_load((ROOT / "cluster" / "ray-up" / "aws.yaml").read_text())["docker"]["run_options"]
    assert "--entrypoint=/usr/bin/env" in options, "Ray starts the container with bash"


def test_image_user_and_ports_are_those_of_the_chart() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    security = values["securityContext"]["pod"]
    assert _instructions("USER") == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    assert _instructions("EXPOSE") == [f"{values['server']['port']} {values['metrics']['port']}"]


def test_ray_in_the_image_is_the_one_of_the_chart() -> None:
    (pinned,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert yaml.safe_load((CHART / "values.yaml").read_text())["ray"]["version"] == pinned


@pytest.mark.slow
def test_install_step_works(tmp_path: Path) -> None:
    """About a minute and 3 GB: everything the image needs, from what the Dockerfile copies and nothing else."""
    context = tmp_path / "context"
    for copy in _instructions("COPY"):
        *sources, target = shlex.split(copy)
        for source in sources:
            destination = context / (source if target == "./" else target)
            ignored = shutil.ignore_patterns("__pycache__", "ray-up")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, destination, ignore=ignored)
            else:
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, destination)
    (install,) = [run for run in _instructions("RUN") if run.startswith("pip install")]
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    bin_ = environment / "bin"
    # The image keeps no cache; a test had better use one, and has no use for bytecode.
    pip = shlex.split(install.replace("--no-cache-dir", "--quiet --no-compile"))
    subprocess.run([bin_ / pip[0], *pip[1:]], cwd=context, check=True)
    assert "serve" in _run([bin_ / "gemray", "--help"], tmp_path)
    # What KubeRay probes is served by the dashboard agent, which plain ray does not bring.
    _run([bin_ / "python", "-c", "import ray.dashboard.agent, triton, boto3"], tmp_path)
    shutil.rmtree(environment)


def _run(command: list[str | Path], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env={"PATH": "/bin"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
