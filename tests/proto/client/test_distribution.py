"""The client's own distribution: built, unpacked, and used without what serves a model."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from support.waiting import HANG_S

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "ray", "transformers", "tokenizers", "numpy", "msgspec", "zmq", "typer", "rich", "prompt_toolkit")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `pip wheel proto` does, with the builder that is installed here: that needs no network."""
    directory = tmp_path_factory.mktemp("wheel")
    script = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", script, str(directory)],
        cwd=ROOT / "proto", capture_output=True, text=True, timeout=HANG_S, check=True,
    )  # fmt: skip
    return directory / built.stdout.split()[-1]


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    """What pip would put into site-packages: a pure wheel is unpacked as it is."""
    target = wheel.parent / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def python(unpacked: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Python with the wheel and what it requires; everything else that is installed here cannot be imported."""
    block = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}))\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = f"sys.path.insert(0, {str(unpacked)!r})\n"
    return subprocess.run(
        [sys.executable, "-P", "-c", block + where + code],
        cwd=unpacked, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


def test_it_requires_grpc_protobuf_and_little_else(wheel: Path) -> None:
    required = [line for line in metadata_of(wheel).get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert {line.split(">")[0] for line in required} == {
        "grpcio",
        "protobuf",
        "googleapis-common-protos",
        "typing-extensions",
    }
    assert wheel.stat().st_size < 1 << 20


def test_it_has_the_client_and_its_types(unpacked: Path) -> None:
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert {"gemray/py.typed", "gemray/client/sync.py", "gemray/v1/generation_pb2.pyi", "gemray/cli/main.py"} <= files
    assert not any(file.startswith(("gemray_cluster", "gemray_workers", "gemray_kernels")) for file in files)


def test_it_is_used_without_what_serves(unpacked: Path) -> None:
    code = """
import gemray.client
assert gemray.client.__file__.startswith(sys.path[0]), gemray.client.__file__
from gemray.client import Client, Retry, ServerUnreachable
from gemray.v1 import generation_pb2 as pb
with Client("127.0.0.1:1", retry=Retry(first_s=0)) as client:
    try:
        client.generate(pb.GenerateRequest(text="Hi"), timeout_s=600)
    except ServerUnreachable as error:
        print(error.code.name)
"""
    result = python(unpacked, code)
    assert (result.returncode, result.stdout) == (0, "UNAVAILABLE\n"), result.stderr


def test_the_command_says_what_it_lacks(unpacked: Path) -> None:
    result = python(unpacked, "from gemray.cli.main import main; main()")
    assert result.returncode == 1
    assert "pip install 'gemray-client[cli]'" in result.stderr


def test_both_distributions_have_one_version() -> None:
    versions = [
        tomllib.loads((ROOT / path).read_text())["project"]["version"]
        for path in ("pyproject.toml", "proto/pyproject.toml")
    ]
    assert versions[0] == versions[1]
    requires = [
        set(tomllib.loads((ROOT / path).read_text())["project"]["dependencies"])
        for path in ("pyproject.toml", "proto/pyproject.toml")
    ]
    assert requires[1] <= requires[0], "gemray has the client in it"
