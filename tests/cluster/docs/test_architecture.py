"""ARCHITECTURE.md names files that exist, folders in import-linter's order, and walks that can be walked."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Stage:
    """A file of a newcomer's walk, and what in it the walk goes through."""

    path: Path
    symbols: list[str]
    """`name`, or `owner.name` of what a class holds."""

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def called(self) -> str:
        """Pattern of what files say that use it; what is private is used by none."""
        public = [symbol for symbol in self.symbols if "._" not in symbol]
        owners = {symbol.split(".")[0] for symbol in self.symbols}
        members = {symbol.split(".")[1] for symbol in public if "." in symbol}
        return "|".join([rf"\b{owner}\b" for owner in owners] + [rf"\.{member}\b" for member in members])

    def defines(self, symbol: str) -> bool:
        return all(re.search(rf"(class|def) {name}\b|^ *{name}(:| =)", self.text, re.M) for name in symbol.split("."))


def walk(column: str) -> list[Stage]:
    """The stages of one walk, in the order in which it goes through them."""
    table = TEXT[TEXT.index("| file | a prompt, down |") :].split("\n\n", 1)[0].splitlines()
    place = [cell.strip() for cell in table[0].split("|")].index(column)
    cells = [(row.split("|")[1].strip(" `"), row.split("|")[place]) for row in table[2:]]
    stages = [
        Stage(next(ROOT / home / path for home in HOMES if (ROOT / home / path).exists()), re.findall("`(.+?)`", cell))
        for path, cell in cells
        if cell.strip()
    ]
    return stages[::-1] if column.endswith("up") else stages


WALKS = ["a prompt, down", "a token, up", "a number of drafts, down"]


@pytest.mark.parametrize("column", WALKS)
def test_a_newcomer_gets_from_file_to_file(column: str) -> None:
    """Each file holds what the walk goes through, and uses what one before it does, or the other way round."""
    stages = walk(column)
    for at, stage in enumerate(stages):
        assert stage.symbols, stage.path
        assert [symbol for symbol in stage.symbols if not stage.defines(symbol)] == [], stage.path
        before = stages[:at]
        reached = [b for b in before if re.search(stage.called, b.text) or re.search(b.called, stage.text)]
        assert reached or not before, f"{stage.path} is not reached from {[b.path.name for b in before]}"


def test_the_walks_are_as_long_as_they_are_said_to_be() -> None:
    said = TEXT[TEXT.index("## A newcomer's three walks") :].split("\n\n", 1)[0]
    assert [int(number) for number in re.findall(r": (\d+)", said)] == [len(walk(column)) for column in WALKS]
