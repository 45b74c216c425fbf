"""What was measured of one setup, as rows of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch

from gemray_cluster.bench.answers import Answer, rate_row
from gemray_cluster.bench.floor import floor_of, prefill_floor_of
from gemray_cluster.bench.inbox import MeasurementFailed, Step
from gemray_cluster.bench.probes import MatrixRates, Probes
from gemray_cluster.bench.report import ExpertsTouched, PrefillRow, RateRow, Row, Spread
from gemray_cluster.bench.settings import Decode, Prefill, Rate, Setup
from gemray_workers.messages import ModelInfo, RankInfo
from gemray_workers.sampling.params import DraftMethod


@dataclass(frozen=True)
class Drafting:
    """Who drafts in a row."""

    method: str
    num_draft_tokens: int
    drafter: int | None
    """Its place among the model's; of two between which the engine chose the one that drafted more. None for none."""
    rounds: dict[str, int]
    """As in `Row`."""

    @classmethod
    def of(cls, model: ModelInfo, draft_method: DraftMethod, rounds: Sequence[int] = ()) -> Drafting:
        """As the requests' `draft_method` says, whose steps had so many `rounds` of each drafter."""
        methods = [drafter.method for drafter in model.drafters]
        if draft_method == "none" or not methods:
            return cls("none", 0, None, {})
        known = dict(enumerate(rounds))
        by_method = {method: known.get(i, 0) for i, method in enumerate(methods)} if len(methods) > 1 else {}
        if draft_method == "auto":
            busiest = max(range(len(methods)), key=lambda i: known.get(i, 0))
            return cls(model.drafter_method, model.num_draft_tokens, busiest, by_method)
        place = methods.index(draft_method)
        return cls(draft_method, model.drafters[place].num_draft_tokens, place, by_method)


@dataclass(frozen=True)
class RowMaker:
    """Rows of one loaded setup on rank 0."""

    setup: Setup
    model: ModelInfo
    info: RankInfo
    load_s: float
    probes: Probes
    matrix_rates: MatrixRates | None
    """None where no prompt is measured."""
    device: torch.device

    def require_steps(self, work: Decode, steps: Sequence[Step]) -> None:
        """Raise MeasurementFailed when no step decoded the whole batch."""
        if not steps:
            raise MeasurementFailed(f"no step decoded all {work.batch} sequences together")

    def decode(
        self,
        work: Decode,
        prefill_s: Sequence[float],
        steps: Sequence[Step],
        *,
        experts: ExpertsTouched | None,
        busy_ms: float | None,
        busiest: Mapping[str, float],
        read_after: float | None,
        peak_memory_bytes: int,
    ) -> Row:
        """A batch's row."""
        setup = self.setup
        num_tokens = sum(step.num_tokens for step in steps)
        rounds = [sum(counts) for counts in zip_longest(*(step.rounds for step in steps), fillvalue=0)]
        drafting = Drafting.of(self.model, work.draft_method, rounds)
        return Row(
            name=setup.name,
            model=Path(setup.model).name,
            method=drafting.method,
            drafter=" + ".join(Path(directory).name for directory in setup.drafter) or None,
            draft_method=work.draft_method,
            rounds=drafting.rounds,
            placement=setup.drafter_placement,
            tp=setup.tp,
            dtype=setup.dtype,
            numerics=setup.numerics,
            kv_dtype=setup.kv_dtype,
            draft_tokens=drafting.num_draft_tokens,
            batch=work.batch,
            sampling=work.sampling,
            lag=work.lag,
            prompt_len=setup.prompt_len,
            steps=len(steps),
            acceptance_asked=setup.acceptance_length,
            acceptance_length=num_tokens / (len(steps) * work.batch),
            prefill=_milliseconds(prefill_s),
            step=_milliseconds([step.seconds for step in steps]),
            draft=_milliseconds([step.draft for step in steps]),
            verify=_milliseconds([step.verify for step in steps]),
            gap=_milliseconds([step.gap for step in steps]),
            rest=_milliseconds([step.seconds - step.draft - step.verify for step in steps]),
            tokens_per_s=num_tokens / sum(step.seconds for step in steps),
            busy_ms=busy_ms,
            busiest=dict(busiest),
            experts=experts,
            floor=floor_of(
                setup.engine_config(),
                work.batch,
                self.probes.best_read(self.device),
                None if experts is None else experts.mean,
                drafting.drafter,
            ),
            weight_bytes=self.info.weight_bytes,
            read_after=read_after,
            peak_memory_bytes=peak_memory_bytes,
            load_s=self.load_s,
            choices={choice.what: choice.chosen for choice in self.model.choices},
            device=self.info.device,
        )

    def prefill(self, work: Prefill, seconds: Sequence[float]) -> PrefillRow:
        """A prompt's row."""
        assert self.matrix_rates is not None
        first_token = _milliseconds(seconds)
        config = self.setup.engine_config()
        bandwidth = self.probes.best_read(self.device).best
        return PrefillRow(
            name=self.setup.name,
            model=Path(self.setup.model).name,
            method=self.model.drafter_method,
            tp=self.setup.tp,
            dtype=self.setup.dtype,
            numerics=self.setup.numerics,
            kv_dtype=self.setup.kv_dtype,
            num_tokens=work.num_tokens,
            chunk=config.chunk,
            first_token=first_token,
            tokens_per_s=1000 * work.num_tokens / first_token.median,
            floor=prefill_floor_of(config, work.num_tokens, matrix_rates=self.matrix_rates, bandwidth=bandwidth),
            device=self.info.device,
        )

    def rate(self, work: Rate, answers: Sequence[Answer]) -> RateRow:
        """A rate's row."""
        method = Drafting.of(self.model, work.draft_method).method
        return rate_row(
            self.setup.name, "engine", work.load, work.per_s, answers, method=method, device=self.info.device
        )


def _milliseconds(seconds: Sequence[float]) -> Spread:
    return Spread.of([1000 * s for s in seconds])
