"""One rank's part of a benchmark: load a setup, run its work, and on rank 0 turn the steps into rows."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from gemray_cluster.bench.acceptance import MadeUpAcceptance
from gemray_cluster.bench.experts import ExpertsWatch
from gemray_cluster.bench.inbox import MeasurementFailed, MeasuringInbox, OnStep
from gemray_cluster.bench.laps import Laps
from gemray_cluster.bench.load import Arrival
from gemray_cluster.bench.peak_memory import PeakMemory
from gemray_cluster.bench.probes import Probes
from gemray_cluster.bench.profile import CycleProfile
from gemray_cluster.bench.rate_inbox import RateInbox
from gemray_cluster.bench.report import AnyRow, Part, PrefillRow, RateRow, Row
from gemray_cluster.bench.rows import RowMaker
from gemray_cluster.bench.sampling import SAMPLING
from gemray_cluster.bench.settings import Decode, Prefill, Rate, Setup, Work
from gemray_workers.engine.graphs import Captures
from gemray_workers.messages import Submit
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.process import ProcessLocation, RankSetup
from gemray_workers.rank.worker import RankWorker
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.verify import Accept, verify

LOOPBACK = "127.0.0.1"
PROFILED_CYCLES = 3
WATCHED_CYCLES = 8
MEASURED_PREFILLS = 3
MANY = 1 << 20


class OfflineRank:
    """A rank of a gang that runs a benchmark's requests instead of a server's."""

    def __init__(self, setup: Setup, rank: int, rendezvous: str, probes: Probes) -> None:
        """Load; all ranks of the setup at the same time."""
        self._laps = Laps(setup.name)
        self._setup = setup
        self._rank = rank
        self._config = setup.engine_config()
        self._moe = Blueprint.of(self._config).model.moe
        device = torch.device(setup.device, rank) if setup.device == "cuda" else torch.device(setup.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._device = device
        leads = rank == 0
        self._probes, self._peak = probes, PeakMemory(device)
        with self._peak.aside():
            if leads:
                probes.read_rates(device)
            matrix_rates = probes.matrix_rates(device, self._config.torch_dtype) if leads and setup.prefill else None
        # One object for all runs: a rule of its own would have graphs of its own.
        length = setup.acceptance_length
        self._made_up = None if length is None else MadeUpAcceptance(length)
        self._is_warm = False
        self._parts = [Part(spent=self._laps.lap("probes", Captures()))]
        started = time.monotonic()
        location = ProcessLocation("this machine", LOOPBACK, gpu=device.index if device.type == "cuda" else None)
        self._worker = RankWorker(self._config, rank, lambda _config: location)
        self._model, info = self._worker.load(
            RankSetup(
                rendezvous=rendezvous,
                interface_ip=LOOPBACK,
                threads=torch.get_num_threads(),
                ranks_here=self._config.gang_size,
            ),
            accept=self._accept(),
        )
        self._maker = RowMaker(setup, self._model, info, time.monotonic() - started, probes, matrix_rates, device)
        load = self._laps.lap("load", self._worker.captures)
        self._parts.append(Part(spent=msgspec.structs.replace(load, parts=info.load_seconds)))

    def parts(self, profiles: Path | None) -> Iterator[Part]:
        """Run all the setup's work; rank 0 yields what came before it and each of its rows, the others nothing.

        A row that cannot be measured is told as such. Whatever else is raised leaves an engine that cannot go on.
        """
        if self._rank == 0:
            yield from self._parts
        for work in self._setup.work:
            row, trouble = None, None
            try:
                row = self._row(work, profiles)
            except MeasurementFailed as error:
                trouble = str(error)
            if self._rank == 0:
                yield Part(spent=self._laps.lap(str(work), self._worker.captures), row=row, trouble=trouble)

    def _row(self, work: Work, profiles: Path | None) -> AnyRow | None:
        match work:
            case Decode():
                return self._decode(work, profiles)
            case Prefill():
                return self._prefill(work)
            case Rate():
                return self._rate(work)

    def close(self) -> None:
        """Leave the gang and give the device's memory back."""
        self._worker.close()
        del self._worker
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _decode(self, work: Decode, profiles: Path | None) -> Row | None:
        prefills = [self._run(work, max_tokens=1) for _ in range(self._setup.prefills)][1:]
        decode = self._run(work, steps=self._setup.steps)
        read_after = self._read_after() if self._rank == 0 else None
        watch = None if self._moe is None else self._watch_experts(work, self._moe.num_experts)
        profile = self._profile(work) if self._setup.profile else None
        if decode is None:
            return None
        # While the run that decodes computes its prompts, its first cycles may have to be captured.
        prefills = prefills or [decode]
        # Only now, when all ranks have made the same runs: the next row finds them together.
        measured = [run for run in (*prefills, decode) if run is not None]
        for run in measured:
            run.require_sound()
        self._maker.require_steps(work, decode.steps)
        if profile is not None and profiles is not None:
            profile.write(profiles / self._profile_name(work))
        return self._maker.decode(
            work,
            [run.prefill_seconds for run in prefills if run is not None],
            decode.steps,
            experts=None if watch is None else watch.result(),
            busy_ms=None if profile is None else profile.busy_ms,
            busiest={} if profile is None else profile.busiest,
            read_after=read_after,
            peak_memory_bytes=self._peak.bytes,
        )

    def _read_after(self) -> float | None:
        """How fast the device reads as the steps have left it."""
        with self._peak.aside():
            return self._probes.sum_now(self._device)

    def _prefill(self, work: Prefill) -> PrefillRow | None:
        alone = Decode(batch=1, sampling="greedy", lag=0)
        runs = [self._run(alone, max_tokens=1, prompt_len=work.num_tokens) for _ in range(1 + MEASURED_PREFILLS)]
        measured = [run for run in runs if run is not None]
        for run in measured:
            run.require_sound()
        return self._maker.prefill(work, [run.prefill_seconds for run in measured[1:]]) if measured else None

    def _rate(self, work: Rate) -> RateRow | None:
        load, vocab_size = work.load, self._model.vocab_size
        if not self._is_warm:
            self._serve(work, load.warm_up(vocab_size))
            self._is_warm = True
        inbox = self._serve(work, load.arrivals(work.per_s, vocab_size))
        return None if inbox is None else self._maker.rate(work, list(inbox.answers.values()))

    def _serve(self, work: Rate, arrivals: Sequence[Arrival]) -> RateInbox | None:
        """Run a load once; on rank 0 what it saw."""
        inbox = None
        if self._rank == 0:
            inbox = RateInbox(
                [
                    (
                        arrival.at_s,
                        Submit(
                            request_id=str(i),
                            prompt_ids=arrival.prompt_ids,
                            params=SamplingParams(
                                **SAMPLING[work.load.sampling],
                                seed=arrival.seed,
                                max_tokens=arrival.num_tokens,
                                draft_method=work.draft_method,
                            ),
                        ),
                    )
                    for i, arrival in enumerate(arrivals)
                ]
            )
        self._worker.run_offline(inbox, accept=self._accept())
        return inbox

    def _watch_experts(self, work: Decode, num_experts: int) -> ExpertsWatch:
        """Count over a few cycles that are not timed; rank 0's counts are the result."""
        watch = ExpertsWatch(num_experts, first=self._setup.warm_up_steps, steps=WATCHED_CYCLES)
        planned = replace(work, lag=0)  # a step is then over when it is published
        self._run(planned, steps=WATCHED_CYCLES, watch=watch, on_step=watch.on_step)
        return watch

    def _profile(self, work: Decode) -> CycleProfile:
        """Record a few cycles; rank 0's are the result, the other ranks only take part."""
        profile = CycleProfile(self._device, first=self._setup.warm_up_steps, cycles=PROFILED_CYCLES)
        self._run(work, steps=PROFILED_CYCLES + 1, on_step=profile.on_step)
        return profile

    def _profile_name(self, work: Decode) -> str:
        drafter = "" if work.draft_method == "auto" else f"-{work.draft_method}"
        return f"profile-{self._setup.name}-batch{work.batch}-{work.sampling}-lag{work.lag}{drafter}.txt"

    def _run(
        self,
        work: Decode,
        *,
        max_tokens: int = MANY,
        prompt_len: int | None = None,
        steps: int = 0,
        on_step: OnStep | None = None,
        watch: ExpertsWatch | None = None,
    ) -> MeasuringInbox | None:
        """Run a batch once; on rank 0 what it saw."""
        inbox = None
        if self._rank == 0:
            submits = self._submits(work, max_tokens, prompt_len or self._setup.prompt_len)
            inbox = MeasuringInbox(submits, warm_up_steps=self._setup.warm_up_steps, steps=steps, on_step=on_step)
        self._worker.run_offline(
            inbox, accept=self._accept(), lag=work.lag, on_experts=None if watch is None else watch.on_experts
        )
        return inbox

    def _accept(self) -> Accept:
        if self._made_up is None:
            return verify
        self._made_up.restart()
        return self._made_up

    def _submits(self, work: Decode, max_tokens: int, prompt_len: int) -> list[Submit]:
        """Requests of random ids, the same in every run."""
        ids = random.Random(0)
        longest = max(1, min(self._setup.batch_len, self._model.max_model_len) - prompt_len)
        return [
            Submit(
                request_id=str(i),
                prompt_ids=[ids.randrange(self._model.vocab_size) for _ in range(prompt_len)],
                params=SamplingParams(
                    **SAMPLING[work.sampling],
                    seed=i,
                    max_tokens=min(max_tokens, longest),
                    draft_method=work.draft_method,
                ),
            )
            for i in range(work.batch)
        ]
