"""Mixed traffic for a stated time, with what must hold all along: ids, pages, sequences at one time, memory.

Requests of every kind come and go in rounds. Each is one of a catalogue whose ids are known from plain decoding, alone;
some are cancelled. Between two rounds the engine is idle: then its planner has found every page in its pool, and memory
is read. The first round and the last are one burst of the same requests, more than may run at one time: if the last has
fewer running at one time than the first, a sequence's place is lost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import msgspec
import psutil
import torch

from gemray_workers.config import EngineConfig
from gemray_workers.execution.compiled_programs import compiled_programs
from gemray_workers.messages import Cancel, FromGang, SequenceDelta, StepOutput, Stop, Submit, ToGang
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from support.engine.engine_runner import request, serve
from support.engine.gpu import device_of, run_engine_on
from support.engine.random_requests import SAMPLERS

CANCELLED_SHARE = 0.3
LEAST_ROUNDS = 2
SAMPLES = 12
"""Times that a rank which knows of no rounds reads its memory, while the traffic lasts."""
MIB = 1 << 20


@dataclass(frozen=True)
class Mismatch:
    """A request whose ids are not those of plain decoding."""

    request: str
    position: int
    found: list[int]
    expected: list[int]


@dataclass
class TrafficReport:
    """What a gang did under traffic, as rank 0 saw it; the other ranks know of their memory and programs alone."""

    device_bytes: list[int] = field(default_factory=list)
    """Allocated on the rank's card, between rounds, or now and then on ranks that know of no rounds. 0 on CPU."""
    host_bytes: list[int] = field(default_factory=list)
    """Resident memory of the rank's process, at the same times."""
    finished: int = 0
    cancelled: int = 0
    tokens: int = 0
    drafts_accepted: int = 0
    preemptions: int = 0
    steps: int = 0
    compiled: int = 0
    """Triton programs that the rank compiled while serving."""
    compiled_names: list[str] = field(default_factory=list)
    """Which they were."""
    mismatches: list[Mismatch] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    pages_left: dict[str, int] = field(default_factory=dict)
    """Pages in use when all was over, by KV group."""
    most_at_first: int = 0
    """Sequences that ran at one time in the first burst."""
    most_at_last: int = 0
    """Sequences that ran at one time in the last one."""

    @property
    def rounds(self) -> int:
        """Rounds after which memory was read."""
        return len(self.device_bytes)

    def growth(self, samples: list[int]) -> int:
        """Bytes by which memory grew from the first third of the rounds to the last, without the first of all."""
        if not samples:
            return 0
        later = samples[1:] if len(samples) > 3 else samples
        third = max(1, len(later) // 3)
        return int(median(later[-third:]) - median(later[:third]))

    def note_memory(self, device: torch.device) -> None:
        """Read what this process holds now."""
        self.device_bytes.append(torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)
        self.host_bytes.append(psutil.Process().memory_info().rss)

    def __str__(self) -> str:
        device, host = self.growth(self.device_bytes) / MIB, self.growth(self.host_bytes) / MIB
        return (
            f"{self.rounds} rounds, {self.finished} requests finished and {self.cancelled} cancelled, {self.tokens} "
            f"tokens in {self.steps} steps, {self.drafts_accepted} drafts accepted, {self.preemptions} preemptions, "
            f"{self.compiled} programs compiled; "
            f"{len(self.mismatches)} with other ids; memory of the card {device:+.1f} MiB, of the host {host:+.1f} MiB"
        )


class TrafficInbox:
    """Rank 0's inbox: rounds of random requests until the time is up, each answer held against the catalogue's."""

    def __init__(
        self,
        catalogue: list[Submit],
        expected: dict[str, list[int]],
        *,
        seconds: float,
        max_num_seqs: int,
        device: torch.device,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.report = TrafficReport()
        self._catalogue, self._expected = catalogue, expected
        self._short = sorted(catalogue, key=lambda submit: len(expected[submit.request_id]))[-len(catalogue) // 2 :]
        self._short = sorted(self._short, key=lambda submit: len(submit.prompt_ids))[:3]
        """Few prompt tokens, not the fewest of output: many of them run at one time."""
        self._max_num_seqs, self._device = max_num_seqs, device
        self._rng, self._clock = random.Random(seed), clock
        self._seconds = seconds
        self._until: float | None = None
        self._arriving: list[Submit] = []
        self._open: dict[str, list[int]] = {}
        self._to_cancel: dict[str, int] = {}
        """By request: tokens after which it is cancelled."""
        self._cancels: list[ToGang] = []
        self._is_burst = self._is_last_round = False
        self._stopped = False

    def poll(self, timeout_s: float) -> list[ToGang]:
        """A few requests of the round, and cancels; a new round once the last has ended; then `Stop`."""
        if not self._arriving and not self._open and not self._stopped and not self._begin_round():
            self._stopped = True
            return [Stop()]
        count = len(self._arriving) if self._is_burst else self._rng.randrange(5)
        arrived, self._arriving = self._arriving[:count], self._arriving[count:]
        for submit in arrived:
            self._open[submit.request_id] = []
        cancels, self._cancels = self._cancels, []
        return [*arrived, *cancels]

    def send(self, message: FromGang) -> None:
        """Hold what a step gave against what was expected."""
        if not isinstance(message, StepOutput) or self._stopped:
            return
        report, stats = self.report, message.stats
        report.steps, report.preemptions = stats.step, stats.num_preemptions
        report.drafts_accepted, report.pages_left = stats.speculation.accepted, stats.pages_in_use
        if stats.compiled_programs > report.compiled:
            report.compiled = stats.compiled_programs
            report.compiled_names = compiled_programs().latest(report.compiled)
        if self._is_last_round:
            report.most_at_last = max(report.most_at_last, stats.num_running)
        elif self._is_burst:
            report.most_at_first = max(report.most_at_first, stats.num_running)
        for delta in message.deltas:
            self._take(delta)

    def _begin_round(self) -> bool:
        """Whether there is another one. The engine is idle now."""
        if self._is_last_round:
            self.report.note_memory(self._device)
            return False
        if self.report.steps:
            self.report.note_memory(self._device)
        if self._until is None:  # what was captured before counts for nothing
            self._until = self._clock() + self._seconds
        self._is_last_round = self._clock() >= self._until and self.report.rounds >= LEAST_ROUNDS
        self._is_burst = self._is_last_round or not self.report.rounds
        count = 2 * self._max_num_seqs if self._is_burst else self._rng.randrange(4, 3 * self._max_num_seqs)
        for i in range(count):
            submit = self._short[i % len(self._short)] if self._is_burst else self._rng.choice(self._catalogue)
            name = f"{submit.request_id}|{self.report.rounds}.{i}"
            self._arriving.append(msgspec.structs.replace(submit, request_id=name))
            if not self._is_burst and self._rng.random() < CANCELLED_SHARE:
                self._to_cancel[name] = self._rng.randrange(0, 10)
        return True

    def _take(self, delta: SequenceDelta) -> None:
        name, report = delta.request_id, self.report
        ids = self._open[name]
        ids += delta.token_ids
        report.tokens += len(delta.token_ids)
        if delta.finish is None:
            if len(ids) >= self._to_cancel.get(name, 1 << 30):
                del self._to_cancel[name]
                self._cancels.append(Cancel(name))
            return
        if delta.fault is not None:
            report.faults.append(f"{name}: {delta.fault}")
        was_cancelled = delta.finish == "cancelled"
        report.cancelled += was_cancelled
        report.finished += not was_cancelled
        expected = self._expected[name.partition("|")[0]]
        if ids != (expected[: len(ids)] if was_cancelled else expected):
            same = next((i for i, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]), len(ids))
            report.mismatches.append(Mismatch(name, same, ids, expected))
        self._to_cancel.pop(name, None)
        del self._open[name]


def catalogue(
    vocab_size: int, max_model_len: int, *, count: int, most_drafts: int, most_tokens: int, seed: int
) -> list[Submit]:
    """Requests of every sampler and of many lengths, drafting as they like; some give log-probabilities."""
    rng = random.Random(seed)
    submits = []
    for i in range(count):
        prompt_len = rng.choice((1, 2, 7, 8, 9, 17, 40, rng.randrange(1, max_model_len - 2)))
        params = {
            **SAMPLERS[i % len(SAMPLERS)],
            "seed": rng.getrandbits(64),
            "num_draft_tokens": rng.choice((None, None, None, 0, rng.randrange(1, most_drafts + 1))),
            "logprobs": 3 if i % 7 == 3 else None,
        }
        prompt = [rng.randrange(3, vocab_size) for _ in range(prompt_len)]
        submits.append(
            request(f"c{i}", prompt, min(rng.randrange(1, most_tokens), max_model_len - prompt_len), **params)
        )
    return submits


def plain_answers(config: EngineConfig, submits: list[Submit]) -> dict[str, list[int]]:
    """Each request's ids, alone on one rank, without a drafter and kernel by kernel."""
    plain = replace(
        config, tensor_parallel_size=1, drafter_path=None, drafter_placement="colocated", num_draft_tokens=None,
        max_num_seqs=1, enforce_eager=True, kv_memory_bytes=64 * MIB, lag=0,
    )  # fmt: skip
    rank = EngineRank(plain, SoloCommunicator(), device_of(plain, 0))
    answers: dict[str, list[int]] = {}
    for submit in submits:
        run = serve(rank, SoloCommunicator(), [submit])
        assert run is not None
        answers |= run.ids
    return answers


def traffic(
    comm: Communicator,
    config: EngineConfig,
    submits: list[Submit],
    expected: dict[str, list[int]],
    seconds: float,
    seed: int = 0,
) -> TrafficReport:
    """On every rank of a gang of `config.gang_size`: load, warm up, and serve mixed traffic for so many seconds."""
    report, interval = TrafficReport(), max(seconds, 1.0) / SAMPLES
    last = time.monotonic()
    at_start = 0

    def on_start() -> None:
        nonlocal at_start
        at_start = compiled_programs().count

    def on_step(device: torch.device) -> None:
        nonlocal last
        if time.monotonic() - last >= interval:
            report.note_memory(device)
            last = time.monotonic()

    def inbox(device: torch.device) -> TrafficInbox:
        return TrafficInbox(
            submits, expected, seconds=seconds, max_num_seqs=config.max_num_seqs, device=device, seed=seed
        )

    found = run_engine_on(comm, config, inbox, on_start=on_start, on_step=on_step, warm=True)
    if found is not None:
        return found.report
    report.compiled = compiled_programs().count - at_start
    report.compiled_names = compiled_programs().latest(report.compiled)
    return report
