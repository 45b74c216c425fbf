"""Run many cases, cell by cell (TP and drafter), and count which situations occurred."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch

from gemray_workers.config import KVDTypeName, NumericsName
from support.processes.gang import GangPools, RunOnGang
from support.random_cases.case import DEDICATED_TP, DRAFTERS, Case, DrafterName, draw_case
from support.random_cases.serving import Served, serve_cases
from support.random_cases.verdict import differences, prepare

TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Cell:
    """Cases that one gang serves."""

    tp: int
    drafter: DrafterName
    kv_dtype: KVDTypeName = "auto"
    numerics: NumericsName = "fast"

    @property
    def gang_size(self) -> int:
        """Processes."""
        return self.tp + (self.drafter == "dedicated")


CELLS = tuple(
    Cell(tp, drafter) for tp in (1, 2, 4) for drafter in DRAFTERS if drafter != "dedicated" or tp in DEDICATED_TP
)
_WEIGHTS = {1: 10, 2: 3, 4: 1}
"""More cases where they cost less, by size of the gang; three ranks count as two."""


@dataclass
class Tally:
    """What was met in some cases."""

    cases: int = 0
    lag_1: int = 0
    padded: int = 0
    requests: int = 0
    tokens: int = 0
    accepted: int = 0
    preemptions: int = 0
    stopped: int = 0
    cancelled: int = 0
    rebuilds: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, case: Case, served: Served, found: Sequence[str]) -> None:
        """One more case."""
        deltas = [delta for life in served.lives for delta in life.deltas]
        self.cases += 1
        self.lag_1 += case.lag
        self.padded += case.limits.padded
        self.requests += len(case.submits)
        self.tokens += sum(len(delta.token_ids) for delta in deltas)
        self.accepted += served.accepted
        self.preemptions += sum(life.stats.num_preemptions for life in served.lives)
        self.stopped += sum(delta.finish == "stop_token" for delta in deltas)
        self.cancelled += len(served.cancelled)
        self.rebuilds += len(served.lives) - 1
        self.differences += [
            f"seed {case.seed}, TP {case.tp}, {case.drafter}, lag {case.lag}, {case.shape}, KV {case.kv_dtype}, "
            f"{case.numerics}: "
            f"{difference}"
            for difference in found
        ]

    def merge(self, other: Tally) -> None:
        """Those of another process."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


def cells_for(count: int, cells: Sequence[Cell] = CELLS) -> dict[Cell, int]:
    """How many of `count` cases each cell has; at least one."""
    weights = {cell: _WEIGHTS.get(cell.gang_size, _WEIGHTS[2]) for cell in cells}
    total = sum(weights.values())
    shares = {cell: max(1, count * weight // total) for cell, weight in weights.items()}
    first = next(iter(shares))
    shares[first] += max(0, count - sum(shares.values()))
    return shares


def run_cell(run_on_gang: RunOnGang, cell: Cell, seeds: Sequence[int], tally: Tally) -> None:
    """Serve the cell's cases of these seeds in one call of a gang and add them to `tally`."""
    cases = [
        draw_case(seed, tp=cell.tp, drafter=cell.drafter, kv_dtype=cell.kv_dtype, numerics=cell.numerics)
        for seed in seeds
    ]
    prepared = [prepare(case) for case in cases]
    lead, *_ = run_on_gang(cell.gang_size, serve_cases, [job for job, _ in prepared], timeout_s=TIMEOUT_S)
    for case, (_, expected), served in zip(cases, prepared, lead, strict=True):
        tally.add(case, served, differences(case, expected, served))


class Worker:
    """Calls of one process, one after the other: its ranks stay up for as long as gangs are of one size."""

    def __init__(self) -> None:
        self._pools = GangPools()
        self._size = 1

    def run(self, cell: Cell, seeds: Sequence[int]) -> Tally:
        """One call of a gang."""
        torch.set_num_threads(1)
        if cell.gang_size != self._size:
            self._pools.close()
            self._size = cell.gang_size
        tally = Tally()
        run_cell(self._pools.run, cell, seeds, tally)
        return tally


@functools.cache
def _worker() -> Worker:
    return Worker()


def run_task(cell: Cell, seeds: Sequence[int]) -> Tally:
    """What an executor's process is given: one call of a gang."""
    return _worker().run(cell, seeds)


def table(tallies: dict[Cell, Tally]) -> Iterator[str]:
    """A Markdown table, a row a cell and one for all."""
    names = [f.name for f in fields(Tally)]
    yield "| TP | drafter | " + " | ".join(name.replace("_", " ") for name in names) + " |"
    yield "| --- | --- |" + " --- |" * len(names)
    total = [0] * len(names)
    for cell, tally in tallies.items():
        counts = [len(tally.differences) if name == "differences" else getattr(tally, name) for name in names]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        yield f"| {cell.tp} | {cell.drafter} | " + " | ".join(map(str, counts)) + " |"
    yield "| | all | " + " | ".join(map(str, total)) + " |"
