"""What the host learns of a cycle: one outcome for each sequence of the plan, with log-probabilities where asked for.

Log-probabilities read the cycle's logits on every rank, so a step that gives any is committed before the next one
starts (`wants_logprobs`).

Shape legend: R rows of logits, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemray_kernels.sequence_tables import NOTHING
from gemray_workers.engine.cycle import CycleOutput
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.execution.host_copy import HostResult, to_device
from gemray_workers.execution.slots import SlotTable
from gemray_workers.execution.step_clock import StepMarks
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.sampling.checksum import logits_checksums
from gemray_workers.sampling.logprobs import token_logprobs
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.token_logprob import TokenLogprob
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.plan import ScheduledRows, StepPlan

PROMPT_LOGPROB_ROWS = 128
"""Prompt rows whose logits are held at one time: a chunk's logits over a whole vocabulary would be gigabytes."""

NO_LOGITS = "the model gave no usable logits (NaN, or every token masked) for the next token"


@dataclass(frozen=True)
class Flight:
    """A step that is enqueued and not yet committed."""

    plan: StepPlan
    cycle: CyclePlan
    output: CycleOutput
    marks: StepMarks
    found: HostResult
    wants_logprobs: bool
    """Whether log-probabilities must be read from `output`, before the next step starts."""


class OutcomeReader:
    """Turns a flight into outcomes: equal ids on every rank, log-probabilities on rank 0, which publishes them.

    The other ranks take part in the collectives and drop the results, 2.5 KB a prompt position.
    """

    def __init__(self, model: TargetModel, comm: Communicator, slots: SlotTable) -> None:
        """Over the model whose hidden states and logits are read."""
        self._model = model
        self._comm = comm
        self._slots = slots
        self._publishes = comm.rank == 0

    def wants_logprobs(self, plan: StepPlan) -> bool:
        """Whether a row of the plan reports log-probabilities."""
        return any(
            r.prompt_logprobs_from is not None or (r.samples and self._slots[r.slot].params.logprobs is not None)
            for r in plan.scheduled
        )

    def outcomes(self, flight: Flight) -> list[SequenceOutcome]:
        """One for each sequence of the plan, in its order. Waits for the cycle."""
        emitted = [Emitted(found) for found in flight.found.rows()]
        if flight.wants_logprobs:
            self._add_logprobs(flight, emitted)
            prompt_logprobs = self._prompt_logprobs(flight.cycle.scheduled, flight.output)
        else:
            prompt_logprobs = {}
        by_slot = {r.slot: e for r, e in zip(flight.cycle.scheduled, emitted, strict=False)}
        nothing = Emitted([0, 0, NOTHING])
        return [by_slot.get(r.slot, nothing).outcome(r, prompt_logprobs.get(r.slot)) for r in flight.plan.scheduled]

    def _add_logprobs(self, flight: Flight, emitted: Sequence[Emitted]) -> None:
        """Fill in the log-probabilities of emitted tokens where a request wants them."""
        logits_RV = flight.output.logits_RV
        if logits_RV is None:
            return
        width = flight.cycle.shape.max_drafts + 1
        wanting: list[tuple[Emitted, SamplingParams]] = []
        index: list[int] = []
        ids: list[int] = []
        for c, (r, e) in enumerate(zip(flight.cycle.scheduled, emitted, strict=False)):
            params = self._slots[r.slot].params
            if params.logprobs is not None and e.ids:
                wanting.append((e, params))
                index += range(c * width, c * width + len(e.ids))
                ids += e.ids
        if not wanting:
            return
        capped_RV = self._model.capped(logits_RV[to_device(index, logits_RV.device)])
        gathered = token_logprobs(
            capped_RV,
            to_device(ids, logits_RV.device),
            max(params.logprobs or 0 for _, params in wanting),
            self._model.shard,
            self._comm,
        )
        checksum_R = None
        if any(params.logits_checksum for _, params in wanting):
            checksum_R = logits_checksums(capped_RV, self._model.shard, self._comm)
        if not self._publishes:
            return
        found = iter(gathered.listed(checksum_R))
        for e, params in wanting:
            e.logprobs = [_cut(next(found), params) for _ in e.ids]

    def _prompt_logprobs(
        self, scheduled: Sequence[ScheduledRows], output: CycleOutput
    ) -> dict[int, list[TokenLogprob]]:
        """By slot; a few rows of logits at a time."""
        found: dict[int, list[TokenLogprob]] = {}
        for s, r in enumerate(scheduled):
            sequence = self._slots[r.slot]
            wanted = sequence.params.prompt_logprobs
            offsets = prompt_logprob_offsets(r, sequence.prompt_len)
            if wanted is None or not offsets:
                continue
            if self._publishes:
                found[r.slot] = []
            # A row's place among its sequence's rows with outputs, less its place among all of them.
            skipped = r.num_known - r.num_outputs if output.is_narrowed else 0
            for begin in range(offsets.start, offsets.stop, PROMPT_LOGPROB_ROWS):
                end = min(begin + PROMPT_LOGPROB_ROWS, offsets.stop)
                row_R = output.first_A[s] + to_device(range(begin - skipped, end - skipped), output.hidden_UH.device)
                gathered = token_logprobs(
                    self._model.logits(output.hidden_UH[row_R]),
                    to_device(sequence.token_ids[r.start + begin + 1 : r.start + end + 1], row_R.device),
                    wanted,
                    self._model.shard,
                    self._comm,
                )
                if self._publishes:
                    found[r.slot] += gathered.listed()
        return found


class Emitted:
    """What one sequence's rows gave: accepted drafts, then a token of the target's own."""

    def __init__(self, found: Sequence[int]) -> None:
        """`found` as in `Settled.found`."""
        self.num_drafts, self.num_accepted, *ids = found
        ids = ids[: self.num_accepted + 1]
        # Where logits were unusable the chooser says -1, which equals no draft: it can only stand last. The drafts
        # before it were accepted, so they are what a run without drafts has emitted by then.
        self.fault = NO_LOGITS if ids[-1] == -1 else None
        self.ids = [token for token in ids if token >= 0]
        self.logprobs: list[TokenLogprob] | None = None

    def outcome(self, rows: ScheduledRows, prompt_logprobs: list[TokenLogprob] | None) -> SequenceOutcome:
        """As the scheduler takes it."""
        return SequenceOutcome(
            slot=rows.slot,
            token_ids=self.ids,
            num_accepted=self.num_accepted,
            num_drafts=self.num_drafts,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
            fault=self.fault,
        )


def prompt_logprob_offsets(r: ScheduledRows, prompt_len: int) -> range:
    """Which of a sequence's rows, counted from its first, give a wanted prompt log-probability.

    The token at prompt position p has its log-probability in the row of position p - 1.
    """
    if r.prompt_logprobs_from is None:
        return range(0)
    first = max(r.prompt_logprobs_from, 1) - 1 - r.start
    last = min(r.start + r.num_known, prompt_len - 1) - r.start
    return range(first, max(first, last))


def _cut(logprob: TokenLogprob, params: SamplingParams) -> TokenLogprob:
    """What one request asked for of what the step found for all."""
    checksum = logprob.logits_checksum if params.logits_checksum else None
    return TokenLogprob(logprob.token_id, logprob.logprob, logprob.top[: params.logprobs], checksum)
