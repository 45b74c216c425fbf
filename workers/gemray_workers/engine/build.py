"""An engine out of its parts: one way for a rank that serves, for measurements and for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from llguidance import LLTokenizer

from gemray_workers.drafters.controller import DraftLengthController
from gemray_workers.drafters.protocol import Drafter
from gemray_workers.engine.cycle import Cycle, CycleOutput, CycleRunner
from gemray_workers.engine.engine import Engine
from gemray_workers.engine.grammar_masks import GrammarMasks
from gemray_workers.engine.grammar_queue import GrammarQueue
from gemray_workers.engine.outcomes import OutcomeReader
from gemray_workers.engine.planner import FollowPlanner, Inbox, LeadPlanner, Planner
from gemray_workers.execution.slots import SlotTable
from gemray_workers.kv.cache import KVCaches
from gemray_workers.kv.pool import KVPools
from gemray_workers.kv.prefix_cache import HashBlock, chained_hash
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import Communicator, compute_dtype
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.sampling.state import SamplingState
from gemray_workers.sampling.verify import Accept, verify
from gemray_workers.scheduling.config import SchedulerConfig
from gemray_workers.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class EngineParts:
    """A loaded model and what belongs to it on one rank."""

    model: TargetModel
    comm: Communicator
    """The ranks that share the model."""
    caches: KVCaches
    """The target's."""
    slots: SlotTable
    drafter: Drafter
    captured_layers: tuple[int, ...] = ()
    """Layers whose outputs the drafter reads."""

    def cycle(self, accept: Accept = verify) -> Cycle:
        """The device's part of a step, kernel by kernel; `accept` stands in for the rule in measurements."""
        return Cycle(
            model=self.model,
            caches=self.caches,
            slots=self.slots,
            drafter=self.drafter,
            captured_layers=self.captured_layers,
            comm=self.comm,
            accept=accept,
        )


@dataclass(frozen=True)
class Schedule:
    """What rank 0 schedules by: limits, and the pages that it gives out."""

    config: SchedulerConfig
    specs: Sequence[KVGroupSpec]
    num_pages: Mapping[str, int]
    """By group."""
    draft_tokens: Mapping[str, int] | None = None
    """Most drafts of a step by method, in the order of the drafters; None where one drafter makes
    `config.num_draft_tokens`, whatever its method."""
    adapt_draft_tokens: bool = False
    """As in `EngineConfig`."""
    hash_block: HashBlock = chained_hash
    """What hashes the prefix cache's blocks (tests)."""
    vocabulary: LLTokenizer | None = None
    """What grammars are compiled for; None where no request has one."""

    def planner(self, inbox: Inbox | None, listeners: Communicator) -> Planner:
        """Rank 0's when there is an `inbox`, else that of a rank that follows; `listeners` hear the plans."""
        if inbox is None:
            return FollowPlanner(listeners)
        most = {"any": self.config.num_draft_tokens} if self.draft_tokens is None else self.draft_tokens
        draft_lengths = DraftLengthController(most, adaptive=self.adapt_draft_tokens)
        scheduler = Scheduler(self.config, self.specs, self.num_pages, draft_lengths, self.hash_block)
        return LeadPlanner(scheduler, listeners, inbox, draft_lengths, GrammarQueue(self.vocabulary))


def build_slots(
    config: SchedulerConfig,
    specs: Sequence[KVGroupSpec],
    shard: ShardIndices,
    dtype: torch.dtype,
    device: torch.device,
) -> SlotTable:
    """The tables of as many sequences as `config` lets run.

    Args:
        config: sequences, their length and their drafts.
        specs: the KV groups whose pages this rank reads or writes.
        shard: the vocabulary that this rank chooses from.
        dtype: of the model; tokens are chosen in its compute dtype.
        device: where the tables lie.
    """
    return SlotTable(
        num_slots=config.max_num_seqs,
        max_model_len=config.max_model_len,
        num_draft_tokens=config.num_draft_tokens,
        specs=specs,
        sampling=SamplingState(config.max_num_seqs, shard, compute_dtype(dtype), device),
        device=device,
    )


def build_engine(
    parts: EngineParts,
    schedule: Schedule,
    inbox: Inbox | None,
    *,
    runner: CycleRunner[CycleOutput] | None = None,
    lag: int | None = None,
    listeners: Communicator | None = None,
    poisoned: Sequence[KVPools] = (),
) -> Engine:
    """Put an engine with no requests together.

    Args:
        parts: of this rank.
        schedule: used on rank 0 alone.
        inbox: what feeds it, on rank 0; None on the others.
        runner: of cycles over `parts`; by default they run kernel by kernel.
        lag: steps that may be in flight while the next one is planned; None is the scheduler's limit.
        listeners: every rank that hears the plans, where a drafter's is among them; by default `parts.comm`.
        poisoned: pools whose freed pages are filled with NaN (debugging).
    """
    planner = schedule.planner(inbox, parts.comm if listeners is None else listeners)
    return Engine(
        cycle=runner or parts.cycle(),
        slots=parts.slots,
        drafter=parts.drafter,
        reader=OutcomeReader(parts.model, parts.comm, parts.slots),
        planner=planner,
        grammar_masks=GrammarMasks(parts.slots, planner, parts.comm),
        lag=schedule.config.lag if lag is None else lag,
        poisoned=poisoned,
    )
