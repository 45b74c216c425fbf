"""The step plan: what rank 0 decides and every rank carries out, as deltas over the state they all hold."""

from __future__ import annotations

import msgspec

from gemray_workers.sampling.params import SamplingParams


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a slot. Also how a preempted sequence comes back, with what it has generated."""

    slot: int
    request_id: str
    token_ids: list[int]
    """Prompt, then what was generated so far."""
    prompt_len: int
    params: SamplingParams
    num_computed: int = 0
    """Tokens at the beginning whose KV is in pages that it is granted."""


class PageGrant(msgspec.Struct, frozen=True, array_like=True):
    """Pages join a sequence's block table of one KV group, from column `first` on."""

    slot: int
    group: str
    first: int
    pages: list[int]


class ScheduledRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one sequence in this step: known tokens, then drafts."""

    slot: int
    start: int
    """Position of the first row. Exact for prompt chunks; while the step before is in flight, a sequence that decodes
    stands there or further on, and the device knows where."""
    num_known: int
    """Rows of tokens that are already decided (prompt, or the newest token)."""
    num_drafts: int
    """Rows of drafted tokens behind them; 0 unless `samples`."""
    samples: bool
    """Whether the known rows reach the sequence's last token, so that the step chooses its next one."""
    prompt_logprobs_from: int | None = None
    """First prompt position whose log-probability this step must report, or None."""
    epoch: int = 0
    """Which of the sequences that had the slot one after the other this is: what comes for an earlier one is void."""
    drafter: int = 0
    """Which of the gang's drafters makes the drafts, by its place in `DrafterPlan.members`."""

    @property
    def num_outputs(self) -> int:
        """Known rows, the last ones, whose output is used: the one that chooses a token, and those from the first that
        gives a prompt log-probability on."""
        wanted = 0
        if self.prompt_logprobs_from is not None:
            # The row before a position gives its token's log-probability.
            wanted = self.start + self.num_known + 1 - max(self.prompt_logprobs_from, 1)
        return min(max(wanted, int(self.samples)), self.num_known)


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. An empty plan (nothing scheduled) only applies admissions, grants and releases."""

    step: int
    released: list[int] = []
    """Slots that are free from now on; applied before admissions."""
    admitted: list[Admission] = []
    granted: list[PageGrant] = []
    scheduled: list[ScheduledRows] = []
    freed_pages: dict[str, list[int]] = {}
    """Pages given back since the last plan, by group: only so that debug runs can poison them, and empty in any
    other run, where thousands of pages would travel for nothing."""
    stop: bool = False
    """The gang ends after this plan."""
