"""Node and the packages of tests/support/node, where they can be had."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "node" / "package.json"
INSTALL_S = 120
"""A registry that does not answer is skipped, not waited for."""


def node_environment(config: pytest.Config, spare: Path) -> dict[str, str]:
    """What `node` needs to find the packages, which are installed once and kept; skips the test where that fails.

    Args:
        config: its cache keeps the packages.
        spare: a directory for them where pytest keeps no cache.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    wanted = json.loads(PACKAGES.read_text())["dependencies"]
    name = "-".join(f"{package.split('/')[-1]}-{version}" for package, version in wanted.items())
    cache = getattr(config, "cache", None)
    kept = (cache.mkdir("node") if cache is not None else spare) / name
    if not kept.exists():
        _install(npm, kept)
    return {"NODE_PATH": str(kept / "node_modules")}


def _install(npm: str, kept: Path) -> None:
    """Beside its place first: another process may do the same, and a half of it is nothing."""
    making = Path(tempfile.mkdtemp(dir=kept.parent))
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    flags += ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]  # without network it ends at once
    try:
        shutil.copy(PACKAGES, making)
        done = subprocess.run(
            [npm, "install", *flags], cwd=making, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"npm cannot install @grpc/grpc-js: {done.stderr.strip().splitlines()[:1]}")
        with suppress(OSError):  # the other process was first
            making.rename(kept)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm has not installed @grpc/grpc-js within {INSTALL_S} s")
    finally:
        shutil.rmtree(making, ignore_errors=True)
