"""ARCHITECTURE.md names files that exist, and folders in the order that import-linter holds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
HOMES = (".", "cluster/gemray_cluster", "workers/gemray_workers", "kernels/gemray_kernels", "tests", "workers")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z_0-9/]+(?:\.py|/))`", TEXT))))
def test_files_exist(path: str) -> None:
    assert any((ROOT / home / path).exists() for home in HOMES)


@pytest.mark.parametrize("root", ["cluster/gemray_cluster", "workers/gemray_workers"])
def test_folders_stand_in_the_order_of_the_contract(root: str) -> None:
    package = Path(root).name
    (layers,) = (contract["layers"] for contract in CONTRACTS if contract.get("containers") == [package])
    expected = [[name.strip() for name in layer.split("|")] for layer in layers]
    table = TEXT[TEXT.index(f"| `{root}` | |") :].split("\n\n", 1)[0]
    told = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()[2:]]
    assert told == [layer for layer in expected if layer != ["errors"]]
