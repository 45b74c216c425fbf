"""What was measured of one setup, as rows of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gemray_cluster.bench.answers import Answer, rate_row
from gemray_cluster.bench.floor import floor_of, prefill_floor_of
from gemray_cluster.bench.inbox import MeasurementFailed, Step
from gemray_cluster.bench.report import ExpertsTouched, PrefillRow, RateRow, Row, Spread
from gemray_cluster.bench.settings import Decode, Prefill, Rate, Setup
from gemray_workers.messages import ModelInfo, RankInfo


@dataclass(frozen=True)
class RowMaker:
    """Rows of one loaded setup on rank 0."""

    setup: Setup
    model: ModelInfo
    info: RankInfo
    load_s: float
    bandwidth: float
    """Bytes a second."""
    matrix_rate: float
    """Operations a second; 0 where no prompt is measured."""
    device: torch.device

    def require_steps(self, work: Decode, steps: Sequence[Step]) -> None:
        """Raise MeasurementFailed when no step decoded the whole batch."""
        if not steps:
            raise MeasurementFailed(
                f"no step decoded all {work.batch} sequences together: kv_memory = "
                f"{self.setup.kv_memory / 2**30:.1f} GiB holds fewer; a larger one, or a smaller batch, is allowed"
            )

    def decode(
        self,
        work: Decode,
        prefill_s: Sequence[float],
        steps: Sequence[Step],
        *,
        experts: ExpertsTouched | None,
        busy_ms: float | None,
    ) -> Row:
        """A batch's row."""
        setup = self.setup
        num_tokens = sum(step.num_tokens for step in steps)
        return Row(
            name=setup.name,
            model=Path(setup.model).name,
            method=self.model.drafter_method,
            drafter=None if setup.drafter is None else Path(setup.drafter).name,
            placement=setup.drafter_placement,
            tp=setup.tp,
            dtype=setup.dtype,
            numerics=setup.numerics,
            draft_tokens=self.model.num_draft_tokens,
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
            experts=experts,
            floor=floor_of(
                setup.engine_config(), work.batch, self.bandwidth, None if experts is None else experts.mean
            ),
            weight_bytes=self.info.weight_bytes,
            peak_memory_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0,
            load_s=self.load_s,
            choices={choice.what: choice.chosen for choice in self.model.choices},
            device=self.info.device,
        )

    def prefill(self, work: Prefill, seconds: Sequence[float]) -> PrefillRow:
        """A prompt's row."""
        first_token = _milliseconds(seconds)
        config = self.setup.engine_config()
        return PrefillRow(
            name=self.setup.name,
            model=Path(self.setup.model).name,
            method=self.model.drafter_method,
            tp=self.setup.tp,
            dtype=self.setup.dtype,
            numerics=self.setup.numerics,
            num_tokens=work.num_tokens,
            chunk=config.chunk,
            first_token=first_token,
            tokens_per_s=1000 * work.num_tokens / first_token.median,
            floor=prefill_floor_of(config, work.num_tokens, matrix_rate=self.matrix_rate, bandwidth=self.bandwidth),
            device=self.info.device,
        )

    def rate(self, work: Rate, answers: Sequence[Answer]) -> RateRow:
        """A rate's row."""
        method = self.model.drafter_method
        return rate_row(
            self.setup.name, "engine", work.load, work.per_s, answers, method=method, device=self.info.device
        )


def _milliseconds(seconds: Sequence[float]) -> Spread:
    return Spread.of([1000 * s for s in seconds])
