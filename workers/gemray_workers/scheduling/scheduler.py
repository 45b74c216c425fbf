"""Rank 0's scheduler: which sequence computes how many tokens in the next step.

One rule and no phases: a sequence has tokens, the first `num_computed` of which are computed; a step gives it rows for
some of the pending ones. When the rows reach the last token the step also chooses the next one, and may verify drafts.

Nothing starves, because an older request never waits for a younger one: preemption takes the newest that runs, and the
oldest that waits may start on what younger ones hold (`admission.choose_admissions`).
- The oldest request is therefore never preempted, and is running or can be admitted at once: nothing older holds
  anything, and every request that was accepted fits alone.
- It gets a row in every step: `max_step_tokens` has a row for each slot, drafts take no row that a prompt needs, shares
  are max-min fair, and it takes pages from newer sequences if none is free.
- So it ends within prompt + max_tokens steps, and a request waits at most for the sum of that over the older ones.
A long prompt holds up nobody: slots permitting, a short one is admitted beside it and gets an equal share of the rows.
While a long one waits for pages, those behind it that fit start at once on the idle ones, and give way as soon as
that lets it start: it waits for pages and slots of older ones alone.
Drafts hold up no prompt: prompts have half of the rows that decoding leaves (`shares.deal`).

With lag 1 a step is planned while the one before it is in flight, so its counts are not known. They are not needed:
- Chunks of known tokens are exact. A sequence that has sampled has one token pending, wherever it stands; its rows say
  the least it can have computed, and the device, which knows better, cuts drafts and rows at the end of the sequence.
- Pages cover the most that it can have computed and the rows that follow, up to its end. Windows are given back by
  what is confirmed, so they cover the rows in flight and the planned ones.
- A sequence that ends, is cancelled or preempted leaves at once. Its rows in flight still run, into pages that may
  have been granted anew: all that reads or writes for the new owner is enqueued behind them on the same stream, and a
  position is written before it is read. What they gave is dropped, by slot and epoch.

With a prefix cache a sequence starts behind the beginning of its text whose KV is present. A page can be found once all
its tokens are confirmed by a commit: no row writes to it after that, in flight or not, for a sequence that lives or has
left, as rows lie behind what is confirmed. Rejected drafts, half-written pages and what a faulty sequence has computed
are never found. Whoever finds a page reads it in a plan made after that commit, behind the rows that wrote it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from gemray_workers.errors import CapacityError, InvalidField
from gemray_workers.grammar.run import GrammarRun
from gemray_workers.kv.prefix_cache import HashBlock, chained_hash
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.messages import EngineStats, FinishReason, SequenceDelta, Submit
from gemray_workers.scheduling.admission import choose_admissions
from gemray_workers.scheduling.config import SchedulerConfig
from gemray_workers.scheduling.counters import Totals
from gemray_workers.scheduling.outcome import (
    SequenceOutcome,
    apply_outcome,
    complete,
    trim_replayed,
    why_not_replayed,
)
from gemray_workers.scheduling.page_ledger import PageLedger
from gemray_workers.scheduling.plan import Admission, ScheduledRows, StepPlan
from gemray_workers.scheduling.request import Sequence
from gemray_workers.scheduling.roster import Roster
from gemray_workers.scheduling.shares import Drafts, Share, deal, num_drafts_within_limits

__all__ = ["DraftsFor", "Scheduler", "SchedulerConfig", "no_drafts"]

DraftsFor = Callable[[Sequence], Drafts]


def no_drafts(_sequence: Sequence) -> Drafts:
    """Plain decoding."""
    return Drafts(0)


class Scheduler:
    """Plans steps and commits what they gave, in order; `schedule` runs at most `lag` steps ahead of `commit`."""

    def __init__(
        self,
        config: SchedulerConfig,
        specs: SequenceOf[KVGroupSpec],
        num_pages: Mapping[str, int],
        drafts_for: DraftsFor = no_drafts,
        hash_block: HashBlock = chained_hash,
    ) -> None:
        """
        Args:
            drafts_for: how many drafts a sequence is to get in the next step, and whose, asked once a step for each
                sequence whose only pending token is its last; cut by `num_drafts_within_limits`.
            hash_block: of the prefix cache's blocks (tests).

        Raises:
            CapacityError: a sequence of `max_model_len` does not fit the pools.
        """
        self._config = config
        self._drafts_for = drafts_for
        self._ledger = PageLedger(specs, num_pages, prefix_cache=config.prefix_cache, hash_block=hash_block)
        for name, wanted in self._ledger.demand(config.max_model_len, config.max_rows).items():
            if wanted > num_pages[name]:
                raise CapacityError(
                    f"a sequence of max_model_len = {config.max_model_len} tokens wants {wanted} pages "
                    f"of group {name}, {num_pages[name]} are available"
                )
        self._roster = Roster(config.max_num_seqs)
        self._cancelled: list[str] = []
        self._deltas: list[SequenceDelta] = []
        self._in_flight: deque[StepPlan] = deque()  # with rows to commit, oldest first
        self._num_arrivals = 0
        self._totals = Totals()

    # Requests in and out

    def submit(self, submit: Submit, grammar: GrammarRun | None = None) -> None:
        """Queue a request; `grammar` is the start of the one that it asks for.

        Raises:
            InvalidField: it can never run (empty or over-long prompt), or its id is in use.
        """
        if submit.request_id in self._roster:
            raise InvalidField("request_id", submit.request_id, "an id that no live request has")
        max_model_len = self._config.max_model_len
        sequence = Sequence.of(submit, arrival=self._num_arrivals, max_model_len=max_model_len)
        trimmed = trim_replayed(submit, max_model_len)
        if grammar is not None:
            if why := why_not_replayed(submit, trimmed, grammar):
                self._deltas.append(_last_delta(sequence, "unmet", fault=why))
                return
            trimmed = complete(trimmed, submit.emitted_ids, grammar)
            sequence.grammar = grammar
        if trimmed.finish is not None:
            self._deltas.append(_last_delta(sequence, trimmed.finish, trimmed.matched_stop_id))
            return
        self._num_arrivals += 1
        self._roster.enqueue(sequence)

    def cancel(self, request_id: str) -> None:
        """End a request at the next `schedule`; unknown ids are ignored."""
        self._cancelled.append(request_id)

    def cancel_all(self) -> None:
        """End every request at the next `schedule`."""
        self._cancelled.extend(self._roster.request_ids)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` has something to plan or `commit` something to tell."""
        return bool(len(self._roster) or self._roster.has_released or self._deltas or self._in_flight)

    # The step

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None when there is nothing to compute and nothing to tell the peers.

        None with a step in flight: whatever runs waits for that one's outcome.
        """
        assert len(self._in_flight) <= self._config.lag, "commit the oldest plan first"
        self._end_cancelled()
        admitted = self._admit()
        running = [seq for seq in self._roster.running if seq not in admitted and not self._ends_in_flight(seq)]
        decoding = [self._decoding(seq) for seq in running if seq.num_pending == 1]
        rest = [seq for seq in running if seq.num_pending > 1]
        shares = self._find_pages(deal(decoding, rest + admitted, self._config), admitted)
        return self._plan(shares, admitted)

    def commit(self, plan: StepPlan, outcomes: SequenceOf[SequenceOutcome]) -> list[SequenceDelta]:
        """Apply what the oldest step in flight gave: one outcome for each sequence that sampled; others may be left
        out. What is for a sequence that has left its slot since the plan was made is dropped.

        Also after a plan without rows: the endings that no step gives (cancelled requests, replays that were complete)
        come from here too.
        """
        if plan.scheduled:
            assert self._in_flight, f"step {plan.step} is not in flight"
            oldest = self._in_flight.popleft()
            assert plan.step == oldest.step, f"step {oldest.step} comes before step {plan.step}"
            plan = oldest
        by_slot = {outcome.slot: outcome for outcome in outcomes}
        running = {(sequence.running_slot, sequence.epoch): sequence for sequence in self._roster.running}
        deltas, self._deltas = self._deltas, []
        for rows in plan.scheduled:
            sequence = running.get((rows.slot, rows.epoch))
            if sequence is None:
                continue
            outcome = by_slot.get(rows.slot, SequenceOutcome(slot=rows.slot, token_ids=[]))
            delta = self._commit_rows(sequence, rows, outcome)
            if delta is not None:
                deltas.append(delta)
        return deltas

    # What the step consists of

    def _decoding(self, sequence: Sequence) -> Share:
        wanted = self._drafts_for(sequence)
        return Share(sequence, 1, num_drafts_within_limits(wanted.number, sequence, self._config), wanted.drafter)

    def _end_cancelled(self) -> None:
        for request_id in self._cancelled:
            sequence = self._roster.get(request_id)
            if sequence is not None:
                self._end(sequence)
                self._deltas.append(_last_delta(sequence, "cancelled"))
        self._cancelled.clear()

    def _ends_in_flight(self, sequence: Sequence) -> bool:
        """Whether what is in flight uses up its budget even if no draft is accepted."""
        return sequence.least_len >= sequence.end_len(self._config.max_model_len)

    def _admit(self) -> list[Sequence]:
        """Let waiting sequences start, oldest first, on what is idle and on what younger ones give up."""
        chosen = choose_admissions(
            self._roster.waiting,
            self._roster.running,
            self._ledger,
            self._config,
            num_free_slots=self._roster.num_free_slots,
        )
        for sequence in chosen.giving_way:
            self._preempt(sequence)
        for sequence, hit in chosen.admitted:
            self._roster.admit(sequence, hit.num_tokens)
            self._ledger.open(sequence.running_slot, sequence.cache_salt, hit)
            if self._config.prefix_cache:
                self._totals.num_looked_up += len(sequence.tokens)
                self._totals.num_found += hit.num_tokens
        return [sequence for sequence, _ in chosen.admitted]

    def _find_pages(self, shares: list[Share], admitted: list[Sequence]) -> list[Share]:
        """Back the rows with pages: known rows oldest first, at the cost of the newest sequence if need be, then drafts
        with what is left. A share shrinks to the pages at hand; one that comes out empty is dropped.

        Pages are found for the most that each sequence can have computed when its rows run. They lie behind those of
        its rows in flight, so `grow` never reaches less than that.
        """
        oldest_first = sorted(shares, key=lambda share: share.sequence.arrival)
        backed = [share for share in oldest_first if self._back_known_rows(share, admitted)]
        for share in backed:
            if share.num_drafts:
                end = self._most_start(share.sequence) + share.num_known
                last = self._last_row_end(share.sequence)
                reached = self._ledger.grow(share.sequence.running_slot, min(end + share.num_drafts, last))
                if reached < last:  # at the end of a sequence the device cuts drafts that were granted
                    share.num_drafts = min(share.num_drafts, reached - end)
        return backed

    def _most_start(self, sequence: Sequence) -> int:
        """The most that can be computed when the next rows of `sequence` run: then it has a token to choose yet."""
        most = sequence.most_len - sequence.num_pending
        return min(most, self._last_row_end(sequence) - 1)

    def _last_row_end(self, sequence: Sequence) -> int:
        """Tokens that `sequence` ever computes: all but its last."""
        return sequence.end_len(self._config.max_model_len) - 1

    def _back_known_rows(self, share: Share, admitted: list[Sequence]) -> bool:
        sequence = share.sequence
        if sequence.slot is None:
            return False  # preempted for the sake of an older one
        start = self._most_start(sequence)
        while (reached := self._ledger.grow(sequence.slot, start + share.num_known)) == start:
            newest = self._roster.running[-1]
            assert newest not in admitted, "an admission must leave pages for the running"
            if newest is sequence:
                return False
            self._preempt(newest)
        share.num_known = reached - start
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything away; it comes back by an admission, with its tokens, and recomputes them."""
        self._ledger.close(sequence.running_slot)
        self._roster.put_back(sequence)
        self._totals.num_preemptions += 1

    def _plan(self, shares: list[Share], admitted: list[Sequence]) -> StepPlan | None:
        if not shares and not self._roster.has_released:
            return None
        self._totals.num_steps += 1
        freed_pages = self._ledger.take_freed()
        plan = StepPlan(
            step=self._totals.num_steps,
            released=self._roster.take_released(),
            admitted=[
                Admission(
                    seq.running_slot, seq.request_id, list(seq.tokens), seq.prompt_len, seq.params, seq.num_computed
                )
                for seq in admitted
            ],
            granted=[grant for share in shares for grant in self._ledger.take_grants(share.sequence.running_slot)],
            scheduled=[share.rows() for share in shares],
            freed_pages=freed_pages if self._config.tells_freed_pages else {},
        )
        for share, rows in zip(shares, plan.scheduled, strict=True):
            share.sequence.in_flight.append(rows)
        if plan.scheduled:
            self._in_flight.append(plan)
        return plan

    def _commit_rows(self, sequence: Sequence, rows: ScheduledRows, outcome: SequenceOutcome) -> SequenceDelta | None:
        self._totals.num_prompt_rows += max(0, min(rows.start + rows.num_known, sequence.prompt_len) - rows.start)
        delta = apply_outcome(sequence, rows, outcome, self._config.max_model_len)
        num_new = 0 if delta is None else len(delta.token_ids)
        self._totals.num_generated += num_new
        self._totals.speculation.record(
            drafted=outcome.num_drafts, accepted=min(outcome.num_accepted, num_new), drafter=rows.drafter
        )
        if outcome.fault is None:
            num_confirmed = min(sequence.num_computed, len(sequence.tokens))  # behind a stop id more is computed
            self._ledger.publish(sequence.running_slot, sequence.tokens, num_confirmed)
        else:
            self._ledger.forget(sequence.running_slot)
        if delta is not None and delta.finish is not None:
            self._end(sequence)
        else:
            self._ledger.release_out_of_window(sequence.running_slot, sequence.num_computed)
        return delta

    def _end(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._ledger.close(sequence.slot)
        self._roster.end(sequence)

    # What can be observed

    @property
    def step(self) -> int:
        """Number of the newest plan."""
        return self._totals.num_steps

    @property
    def running(self) -> SequenceOf[Sequence]:
        """The sequences that hold slots, oldest first."""
        return self._roster.running

    @property
    def ledger(self) -> PageLedger:
        """The pages; to look at."""
        return self._ledger

    def stats(self, last_step_seconds: float) -> EngineStats:
        """The state after the last commit."""
        return EngineStats(
            step=self._totals.num_steps,
            num_running=len(self._roster.running),
            num_waiting=len(self._roster.waiting),
            num_preemptions=self._totals.num_preemptions,
            pages_in_use=self._ledger.pages_in_use,
            pages_total=self._ledger.pages_total,
            prompt_tokens=self._totals.num_prompt_rows,
            generated_tokens=self._totals.num_generated,
            last_step_seconds=last_step_seconds,
            speculation=self._totals.speculation.counters(),
            prefix_cache_queries=self._totals.num_looked_up,
            prefix_cache_hits=self._totals.num_found,
            prefix_cache_evictions=self._ledger.num_evicted,
            pages_cached=self._ledger.pages_cached,
        )

    def check_integrity(self) -> None:
        """Every page is held by running sequences, as many as are counted (so none is when nothing runs), idle in the
        prefix cache, or free; every slot is free or taken by one, and every running sequence is older than every
        waiting one.

        Raises:
            PageError: the pages do not add up. The rest is asserted.
        """
        self._ledger.check(sequence.running_slot for sequence in self._roster.running)
        self._roster.check()


def _last_delta(
    sequence: Sequence, finish: FinishReason, matched_stop_id: int | None = None, *, fault: str | None = None
) -> SequenceDelta:
    """The end of a request outside any step."""
    return SequenceDelta(
        request_id=sequence.request_id,
        token_ids=[],
        finish=finish,
        matched_stop_id=matched_stop_id,
        fault=fault,
        cached_tokens=sequence.num_cached or 0,
        speculation=sequence.speculation.counters(),
    )
