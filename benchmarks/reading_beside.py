"""Times decode steps while a resident kernel takes part of the memory's rate: a card that reads more slowly.

    PYTHONPATH=benchmarks:kernels:workers:proto:cluster:tests python benchmarks/reading_beside.py \
        --suite benchmarks/suites/quantized.toml --only 31B-w4a16 --batch 1 --leave 3.06

An H200 has an H100's multiprocessors and reads 1.4 times as fast, so what a step does beside reading weighs more on
it. Here a kernel of few warps a multiprocessor reads at a stated rate, held by the device's clock, on a stream of its
own in the engine's process: kernels of two processes would take turns instead. The rate is set so that a sum over 2
GiB, measured beside it in the same process, reads at `--leave` TB/s. That is no faster than the card that it stands in
for:

- the reader takes its rate whatever the engine does, also when that reads little, and memory is the busier for it;
- it holds registers and issues instructions, and its lines pass through the cache that the engine's data lie in.

So a step beside it takes at least as long as on such a card, as far as reads are what differs; clocks, cache and power
may differ besides. Each row has the step alone and beside the reader, both with the rate of the same sum in the same
state, and what the reader read during the steps: where it fell short of its rate, or ended early, the row says so.
Programs that want all registers of a multiprocessor wait until the reader has ended where it is on each: few programs
of many warps give tighter bounds (`results/2026-11-30-h200-reading-beside`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from gemray_cluster.bench.floor import floor_of
from gemray_cluster.bench.kv_memory import with_kv_memory
from gemray_cluster.bench.offline import OfflineRank
from gemray_cluster.bench.probes import BYTES, Probes, ReadRates, sum_rate
from gemray_cluster.bench.settings import Decode, Setup
from gemray_cluster.bench.suites import read_suite

NUMBERS_A_THREAD = 32
TURNS = 8
"""Blocks that a program reads between two looks at the flag."""
LASTING_S = 3.0
"""The reader ends by itself after so long."""
WARM_UP_STEPS = 6
HELD = 0.99
"""The least share of its rate that a reader holds."""
_ALONE = ("TB/s of a sum", "step ms", "gap", "floor", "x floor")
COLUMNS = ("row", *_ALONE, "reader, TB/s (share of what it is to read)", *(f"{name} beside it" for name in _ALONE))
TRIES = 8
CLOSE = 0.004
"""How near to the rate that is to be left a search ends, as a share of it."""


@triton.jit
def _timer_after_sleep() -> tl.tensor:
    """The device's clock, after a moment in which other warps have the multiprocessor to themselves."""
    return tl.inline_asm_elementwise(
        "nanosleep.u32 100; mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["picoseconds_each"])
def read_paced(
    x_N: tl.tensor,
    flag_1: tl.tensor,
    read_P: tl.tensor,
    num_blocks: int,
    picoseconds_each: int,
    lasting_us: int,
    BLOCK: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    """Read blocks in turn, none before its time, until the flag is set or time is up; blocks read, by program."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    began = globaltimer()
    now = began
    total = tl.zeros((BLOCK,), tl.int32)
    block = program
    num_read = tl.full((), 0, tl.int64)
    going = (now - began) // 1000 < lasting_us
    while going:
        for _ in range(TURNS):
            total += tl.load(x_N + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
            block = tl.where(block + programs < num_blocks, block + programs, program)
            num_read += 1
            now = globaltimer()
            while (now - began) * 1000 < num_read * picoseconds_each:
                now = _timer_after_sleep()
        going = (tl.load(flag_1, volatile=True) == 0) & ((now - began) // 1000 < lasting_us)
    # What was read has to be used, or it would not be read: the numbers are never negative.
    tl.store(read_P + program, tl.where(tl.sum(total.to(tl.int64)) < 0, -1, num_read))


@dataclass
class Reading:
    """What the reader did from start to end."""

    rate: float = 0.0
    """Bytes a second."""
    was_told: bool = False
    """Whether it read until it was told to end, and not until its time was up."""


class ResidentReader:
    """Reads memory at a rate beside other work of this process."""

    def __init__(self, device: torch.device, programs: int, warps: int) -> None:
        """Make what it reads, and compile it."""
        self._device, self._programs, self._warps = device, programs, warps
        self._block = warps * 32 * NUMBERS_A_THREAD
        self._x_N = torch.ones(BYTES["cuda"] // 4, dtype=torch.int32, device=device)
        self._flag_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self._read_P = torch.zeros(programs, dtype=torch.int64, device=device)
        self._set_1 = torch.ones(1, dtype=torch.int32).pin_memory()
        self._reads, self._tells = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self.rate = 1e12
        with self.reading():  # compiled and loaded before anything is measured
            pass

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Read at `rate` bytes a second until the end of the block, which knows then what was read."""
        found = Reading()
        end = self.start()
        yield found
        end(found)

    def start(self) -> Callable[[Reading], None]:
        """Begin; the result ends it, waits, and says what was read."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        picoseconds_each = round(1e12 * 4 * self._block * self._programs / self.rate)
        with torch.cuda.stream(self._reads):
            self._flag_1.zero_()
            before.record()
            read_paced[(self._programs,)](
                self._x_N,
                self._flag_1,
                self._read_P,
                self._x_N.numel() // self._block,
                picoseconds_each,
                round(1e6 * LASTING_S),
                BLOCK=self._block,
                TURNS=TURNS,
                num_warps=self._warps,
            )
            after.record()

        def end(found: Reading) -> None:
            found.was_told = not after.query()
            with torch.cuda.stream(self._tells):
                self._flag_1.copy_(self._set_1, non_blocking=True)
            self._tells.synchronize()
            after.synchronize()
            seconds = before.elapsed_time(after) / 1000
            found.rate = int(self._read_P.sum()) * 4 * self._block / seconds

        return end

    def leave(self, rate: float, measure: Callable[[], float]) -> float:
        """Set `rate` so that `measure` reads as fast as that beside it; what it read in the end."""
        slow, fast = 5e10, 6e12
        self.rate = max(slow, measure() - rate)
        left = 0.0
        for _ in range(TRIES):
            with self.reading():
                left = measure()
            if abs(left / rate - 1) < CLOSE:
                break
            slow, fast = (self.rate, fast) if left > rate else (slow, self.rate)
            guess = self.rate + left - rate
            self.rate = guess if slow < guess < fast else (slow + fast) / 2
        return left


class BesideReader(OfflineRank):
    """A rank whose timed steps have the reader beside them, where there is one."""

    reader: ResidentReader | None = None
    reading = Reading()

    def step_ms(self, work: Decode) -> tuple[float, float]:
        """Median of a step and of what the device waits between two."""
        inbox = self._run(work, steps=self._setup.steps, on_step=self._on_step)
        assert inbox is not None
        inbox.require_sound()
        steps = inbox.steps
        return 1000 * median(step.seconds for step in steps), 1000 * median(step.gap for step in steps)

    def floor_bytes(self, work: Decode) -> int:
        """What a step reads at least."""
        floor = floor_of(self._setup.engine_config(), work.batch, ReadRates(1.0, 1.0))
        return floor.target_bytes + floor.drafter_bytes

    def _on_step(self, num_decoded: int) -> None:
        if self.reader is None:
            return
        if num_decoded == self._setup.warm_up_steps - 2:  # the next ones are enqueued already
            self._end = self.reader.start()
        if num_decoded == self._setup.warm_up_steps + self._setup.steps:
            self.reading = Reading()
            self._end(self.reading)


def measure(setup: Setup, options: argparse.Namespace) -> None:
    """Print the rows of one setup, as cells of `COLUMNS`."""
    device = torch.device("cuda", 0)
    rank = BesideReader(setup, 0, f"tcp://127.0.0.1:{options.port}", Probes())
    x_N = torch.ones(BYTES["cuda"] // 4, dtype=torch.float32, device=device)
    works = [work for work in setup.work if isinstance(work, Decode)]
    for work in works:
        rank.step_ms(work)  # captures its cycles
    alone = [(sum_rate(x_N), *rank.step_ms(work)) for work in works]
    for programs, warps in options.reader:
        rank.reader = reader = ResidentReader(device, programs, warps)
        left = reader.leave(1e12 * options.leave, lambda: sum_rate(x_N))
        for work, (rate, ms, gap) in zip(works, alone, strict=True):
            beside_ms, beside_gap = rank.step_ms(work)
            with reader.reading():
                left = max(left, sum_rate(x_N))
            num_bytes, reading = rank.floor_bytes(work), rank.reading
            held = reading.rate / reader.rate
            fell_short = "" if reading.was_told and held > HELD else ", NOT HELD"
            cells = (
                f"{setup.name}, {work}",
                *_cells(rate, ms, gap, num_bytes),
                f"{programs} x {warps}: {reading.rate / 1e12:.2f} ({held:.3f}{fell_short})",
                *_cells(left, beside_ms, beside_gap, num_bytes),
            )
            print(f"| {' | '.join(cells)} |", flush=True)
        rank.reader = None
    rank.close()


def _cells(rate: float, ms: float, gap_ms: float, num_bytes: int) -> tuple[str, ...]:
    floor_ms = 1000 * num_bytes / rate
    return f"{rate / 1e12:.2f}", f"{ms:.2f}", f"{gap_ms:.3f}", f"{floor_ms:.2f}", f"{ms / floor_ms:.3f}"


def _pair(text: str) -> tuple[int, int]:
    programs, warps = text.split("x")
    return int(programs), int(warps)


def main() -> None:
    """Each setup in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--leave", type=float, default=3.06, help="TB/s that are left to a sum")
    parser.add_argument("--reader", type=_pair, nargs="+", default=[(48, 16)], help="programs x warps, such as 48x16")
    parser.add_argument("--port", type=int, default=29_517)
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    changes: dict[str, Any] = {"batch": options.batch, "prefill": [], "warm_up_steps": WARM_UP_STEPS}
    for setup in read_suite(options.suite, changes, options.only):
        measure(with_kv_memory(replace(setup, profile=False)), options)


if __name__ == "__main__":
    # Streams beyond as many hardware queues would wait behind the reader.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    main()
