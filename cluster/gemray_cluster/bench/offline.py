"""One rank's part of a benchmark: load a setup, run its batches, and on rank 0 turn the steps into rows."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from gemray_cluster.bench.acceptance import MadeUpAcceptance
from gemray_cluster.bench.bandwidth import BandwidthProbe
from gemray_cluster.bench.floor import floor_of
from gemray_cluster.bench.inbox import MeasurementFailed, MeasuringInbox, OnStep, Step
from gemray_cluster.bench.profile import CycleProfile
from gemray_cluster.bench.report import Row, Spread
from gemray_cluster.bench.settings import Setup
from gemray_workers.messages import ModelInfo, RankInfo, Submit
from gemray_workers.rank.worker import GangWorker
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.verify import Accept, verify

PROFILED_CYCLES = 3
SAMPLING: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "published": {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "min_p": 0.0, "suppress_tokens": (258882, 258883)},
}
"""The published ids to forbid are those that begin images and audio."""


class OfflineRank:
    """A rank of a gang that serves nobody."""

    def __init__(self, setup: Setup, rank: int, rendezvous: str, probe: BandwidthProbe) -> None:
        """Load; all ranks of the setup at the same time."""
        self._setup = setup
        self._rank = rank
        self._config = setup.engine_config()
        device = torch.device(setup.device, rank) if setup.device == "cuda" else torch.device(setup.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._device = device
        self._bandwidth = probe.read(device) if rank == 0 else 0.0
        started = time.monotonic()
        self._worker = GangWorker(self._config, rank, rendezvous)
        self._model, self._info = self._worker.load()
        self._load_s = time.monotonic() - started

    def rows(self, profiles: Path | None) -> Iterator[Row]:
        """Run every batch; rank 0 yields a row for each, the others nothing."""
        for batch in self._setup.batch:
            row = self._measure(batch)
            busy_ms = self._busy_ms(batch, profiles) if self._setup.profile else None
            if row is not None:
                yield msgspec.structs.replace(row, busy_ms=busy_ms)

    def close(self) -> None:
        """Leave the gang and give the device's memory back."""
        self._worker.close()
        del self._worker
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure(self, batch: int) -> Row | None:
        prefills = [self._run(batch, max_tokens=1) for _ in range(self._setup.prefills)][1:]
        decode = self._run(batch, steps=self._setup.steps)
        if decode is None:
            return None
        prefill_s = [run.prefill_seconds for run in (*prefills, decode) if run is not None]
        return self._row(batch, prefill_s, decode.steps)

    def _busy_ms(self, batch: int, directory: Path | None) -> float | None:
        """From a profile of a few cycles on rank 0, written to `directory`; the other ranks only take part."""
        profile = CycleProfile(self._device, first=self._setup.warm_up_steps, cycles=PROFILED_CYCLES)
        self._run(batch, steps=PROFILED_CYCLES + 1, on_step=profile.on_step)
        if self._rank != 0:
            return None
        if directory is not None:
            profile.write(directory / f"profile-{self._setup.name}-batch{batch}.txt")
        return profile.busy_ms

    def _run(
        self, batch: int, *, max_tokens: int = 1 << 20, steps: int = 0, on_step: OnStep | None = None
    ) -> MeasuringInbox | None:
        accept = self._accept()
        if self._rank != 0:
            self._worker.run_offline(None, accept=accept)
            return None
        inbox = MeasuringInbox(
            self._submits(batch, max_tokens), warm_up_steps=self._setup.warm_up_steps, steps=steps, on_step=on_step
        )
        self._worker.run_offline(inbox, accept=accept)
        return inbox

    def _accept(self) -> Accept:
        length = self._setup.acceptance_length
        return verify if length is None else MadeUpAcceptance(length)

    def _submits(self, batch: int, max_tokens: int) -> list[Submit]:
        """Requests of random ids, the same in every run."""
        ids = random.Random(0)
        longest = self._model.max_model_len - self._setup.prompt_len
        return [
            Submit(
                request_id=str(i),
                prompt_ids=[ids.randrange(self._model.vocab_size) for _ in range(self._setup.prompt_len)],
                params=SamplingParams(**SAMPLING[self._setup.sampling], seed=i, max_tokens=min(max_tokens, longest)),
            )
            for i in range(batch)
        ]

    def _row(self, batch: int, prefill_s: list[float], steps: list[Step]) -> Row:
        if not steps:
            raise MeasurementFailed(f"no step of batch {batch} decoded all of it: more steps, or more KV memory")
        return _row(
            self._setup, self._model, self._info, batch=batch, prefill_s=prefill_s, steps=steps,
            load_s=self._load_s, bandwidth=self._bandwidth, device=self._device,
        )  # fmt: skip


def _row(
    setup: Setup,
    model: ModelInfo,
    info: RankInfo,
    *,
    batch: int,
    prefill_s: list[float],
    steps: list[Step],
    load_s: float,
    bandwidth: float,
    device: torch.device,
) -> Row:
    seconds = sum(step.seconds for step in steps)
    num_tokens = sum(step.num_tokens for step in steps)
    return Row(
        name=setup.name,
        model=Path(setup.model).name,
        method=model.drafter_method,
        drafter=None if setup.drafter is None else Path(setup.drafter).name,
        placement=setup.drafter_placement,
        tp=setup.tp,
        dtype=setup.dtype,
        draft_tokens=model.max_draft_tokens,
        batch=batch,
        prompt_len=setup.prompt_len,
        steps=len(steps),
        acceptance_asked=setup.acceptance_length,
        acceptance_length=num_tokens / (len(steps) * batch),
        prefill=_milliseconds(prefill_s),
        step=_milliseconds([step.seconds for step in steps]),
        draft=_milliseconds([step.draft for step in steps]),
        verify=_milliseconds([step.verify for step in steps]),
        rest=_milliseconds([step.seconds - step.draft - step.verify for step in steps]),
        tokens_per_s=num_tokens / seconds,
        floor=floor_of(setup.engine_config(), batch, bandwidth),
        weight_bytes=info.weight_bytes,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        load_s=load_s,
        choices={choice.what: choice.chosen for choice in model.choices},
        device=info.device,
    )


def _milliseconds(seconds: list[float]) -> Spread:
    return Spread.of([1000 * s for s in seconds])
