"""The image: no engine builds it here, so its file is linted and its install step is run in a fresh environment."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from gemray.cli.openai import openai
from support.deployment.helm_chart import CHART, ROOT
from support.deployment.linked_packages import lend_packages

DOCKERFILE = ROOT / "helm" / "docker" / "Dockerfile"
LOCK = DOCKERFILE.parent / "requirements.lock"
EXTRAS = ("gpu", "cluster", "tracing", "openai")


def _instructions(name: str) -> list[str]:
    """Arguments of every `name` instruction, continuation lines joined."""
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text())
    return [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith(f"{name} ")]


def _copies() -> list[list[str]]:
    """Sources and target of each COPY out of the repository."""
    return [shlex.split(copy) for copy in _instructions("COPY") if not copy.startswith("--from")]


def test_lints() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    linted = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


def test_copies_exist_and_pass_the_ignore_file() -> None:
    allowed = {
        line[1:] for line in DOCKERFILE.with_suffix(".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    sources = {source for *sources, _ in _copies() for source in sources}
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
    gateway = inspect.signature(openai).parameters["port"].default
    assert _instructions("EXPOSE") == [f"{values['server']['port']} {values['metrics']['port']} {gateway}"]


def test_ray_in_the_image_is_the_one_of_the_chart() -> None:
    (pinned,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert yaml.safe_load((CHART / "values.yaml").read_text())["ray"]["version"] == pinned


def test_the_last_stage_has_no_compiler_and_the_one_that_triton_asks_for_is_a_file_of_ours() -> None:
    last = DOCKERFILE.read_text().rpartition("\nFROM ")[2]
    assert not re.search(r"\b(gcc|clang|build-essential|libc6-dev)\b", last)
    (environment,) = [env for env in _instructions("ENV") if env.startswith("CC=")]
    assert shlex.split(environment)[0] == "CC=/usr/local/lib/gemray-triton/cc"
    assert any("cp helm/docker/cc /install/lib/gemray-triton/cc" in run for run in _instructions("RUN"))
    assert os.access(DOCKERFILE.parent / "cc", os.X_OK)


def test_the_base_may_be_named_by_its_digest() -> None:
    images = {image.partition(" ")[0] for image in _instructions("FROM")}
    assert images == {"${PYTHON_IMAGE}"}
    assert _instructions("ARG") == ["PYTHON_IMAGE=python:3.12-slim-bookworm"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the image's build stage has gcc")
def test_triton_gets_its_driver_without_a_compiler(tmp_path: Path) -> None:
    """As the build stage and the image do it."""
    docker, built = DOCKERFILE.parent, tmp_path / "gemray-triton"
    subprocess.run([sys.executable, docker / "triton_driver.py", built], check=True, timeout=600)
    compiler = shutil.copy(docker / "cc", built)
    environment = {**os.environ, "CC": str(compiler), "TRITON_CACHE_DIR": str(tmp_path / "cache")}

    def ask(source: str) -> subprocess.CompletedProcess[str]:
        asked = (
            "import sys; from triton.runtime.build import _build\n"
            f"_build('cuda_utils', {source!r}, {str(tmp_path)!r}, [], [], ['libcuda.so.1'], [])"
        )
        command = [sys.executable, "-c", asked]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)

    given = ask(str(built / "driver.c"))
    assert given.returncode == 0, given.stderr
    (module,) = tmp_path.glob("cuda_utils*.so")
    assert module.read_bytes() == (built / "cuda_utils.so").read_bytes()
    other = tmp_path / "other.c"
    other.write_text("int x;")
    refused = ask(str(other))
    assert refused.returncode != 0
    assert "this image has no C compiler" in refused.stderr


def _locked() -> dict[str, str]:
    """What the lock file names, with its version; each has a hash."""
    entries = re.split(r"\n(?=\S)", LOCK.read_text())
    pins = [re.match(r"([a-z0-9-]+)==(\S+) \\\n", entry) for entry in entries if not entry.startswith("#")]
    assert None not in pins
    assert all("--hash=sha256:" in entry for entry in entries if not entry.startswith("#"))
    return {pin[1]: pin[2] for pin in pins if pin is not None}


def _asked_for() -> list[str]:
    """The image's requirements: gemray's, and its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [requirement for extra in EXTRAS for requirement in project["optional-dependencies"][extra]]
    own = (DOCKERFILE.parent / "requirements.in").read_text().splitlines()
    return [*project["dependencies"], *extras, *(line for line in own if line and not line.startswith("#"))]


def test_the_lock_has_all_that_gemray_asks_for() -> None:
    locked = _locked()
    for text in _asked_for():
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[requirement.name]), text
    for name, pinned in re.findall(r"^([a-z-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE):
        assert locked[name] == pinned
    assert "nvidia-nccl-cu13" in locked, "torch's CUDA build"
    target = re.search(r"^lock:\n(?:\t.*\n)+", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target is not None
    assert tuple(re.findall(r"--extra (\S+)", target[0])) == EXTRAS


@pytest.mark.slow
def test_install_step_works(tmp_path: Path) -> None:
    """Everything the image needs, from what the Dockerfile copies and nothing else.

    Without the lock file: its packages are for the image's Python and GPUs, 8 GB of them. Those of the tests' own
    environment that gemray asks for are lent.
    """
    context = tmp_path / "context"
    for *sources, target in _copies():
        for source in sources:
            is_folder = target.endswith("/")
            destination = context / (target if not is_folder else f"{target}{Path(source).name}")
            ignored = shutil.ignore_patterns("__pycache__", "ray-up")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, destination, ignore=ignored)
            else:
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, destination)
    (install,) = [run for run in _instructions("RUN") if run.startswith("pip install") and "--no-deps" in run]
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    bin_ = environment / "bin"
    # One of its own would take seconds to unpack.
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", bin_ / "python"]
    (site_packages,) = (environment / "lib").glob("python*/site-packages")
    lend_packages(_asked_for(), site_packages)
    needs: list[str | Path] = [
        f".[{','.join(EXTRAS)}]",
        "-r",
        DOCKERFILE.parent / "requirements.in",
        "-c",
        ROOT / "constraints.txt",
    ]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", *needs], cwd=context, check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "gemray"], check=True)
    # The image keeps no cache; a test had better use one, and has no use for bytecode.
    own = shlex.split(install.partition("&&")[0].replace("--no-cache-dir", "--quiet --no-compile"))
    own[own.index("--prefix") : own.index("--prefix") + 2] = []
    assert own[0] == "pip"
    subprocess.run([*pip, *own[1:]], cwd=context, check=True)
    assert "serve" in _run([bin_ / "gemray", "--help"], tmp_path)
    # What KubeRay probes is served by the dashboard agent, which plain ray does not bring.
    _run([bin_ / "python", "-c", "import ray.dashboard.agent, triton, boto3, opentelemetry.sdk"], tmp_path)
    shutil.rmtree(environment)


def _run(command: list[str | Path], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env={"PATH": "/bin"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
