"""The committed modules run with the oldest gRPC and protobuf that pyproject.toml allows, and with what came since.

`make proto-check` imports them with exactly those; here the guards that generators write are held against the pins.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATED = ROOT / "proto" / "gemray" / "v1"
RUNTIME = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "protobuf")

Version = tuple[int, ...]


def version(text: str) -> Version:
    return tuple(int(part) for part in text.split("."))


def asked_protobuf(module: str) -> Version:
    """The protobuf that a generated module insists on: older ones, and the second major after it, are refused."""
    guard = re.search(r"ValidateProtobufRuntimeVersion\(\s*[\w.]+,\s*(\d+),\s*(\d+),\s*(\d+),", module)
    return tuple(int(part) for part in guard.groups()) if guard else ()


def asked_grpcio(module: str) -> Version:
    """The grpcio that a generated module insists on."""
    guard = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", module)
    return version(guard[1]) if guard else ()


def lower_bounds() -> dict[str, str]:
    """Lower bounds of pyproject.toml; a specifier of another kind than ``>=`` fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = dict(dependency.split(">=") for dependency in project["dependencies"])
    assert all(re.fullmatch(r"[\d.]+", bound) for bound in found.values()), "no upper bounds"
    return found


def generator_pins() -> dict[str, str]:
    """Lower bounds of the generator, which includes the oldest runtime packages."""
    files = ("lowest.txt", "generator.txt")
    lines = [line for name in files for line in (ROOT / "proto" / name).read_text().splitlines()]
    return dict(line.partition(" ")[0].split("==") for line in lines if "==" in line)


def test_guards_are_read() -> None:
    newest = "_runtime_version.ValidateProtobufRuntimeVersion(\n  _runtime_version.Domain.PUBLIC,\n 7,\n 35,\n 1,\n '',"
    assert asked_protobuf(newest) == (7, 35, 1)
    assert asked_grpcio("GRPC_GENERATED_VERSION = '1.85.1'") == (1, 85, 1)


@pytest.mark.parametrize("path", sorted(GENERATED.glob("*_pb2*.py")), ids=lambda path: path.name)
def test_the_oldest_allowed_packages_are_not_refused(path: Path) -> None:
    module, bounds = path.read_text(), lower_bounds()
    assert asked_grpcio(module) <= version(bounds["grpcio"])
    assert asked_protobuf(module) == (), "a guard also refuses a protobuf two major versions newer"


@pytest.mark.parametrize("package", RUNTIME)
def test_the_check_imports_with_the_lowest_pins(package: str) -> None:
    assert generator_pins()[package] == lower_bounds()[package]


def test_grpc_packages_move_together() -> None:
    """A newer grpcio-status beside an older grpcio-health-checking may ask for another protobuf."""
    bounds = lower_bounds()
    assert len({bounds[package] for package in RUNTIME if package.startswith("grpcio")}) == 1
    assert generator_pins()["grpcio-tools"] == bounds["grpcio"]
