"""Messages between the coordinator and rank 0 of a gang. Plain data, encoded as msgpack by msgspec."""

from __future__ import annotations

from itertools import zip_longest
from typing import Literal

import msgspec

from gemray_workers.checkpoint.identity import CheckpointIdentity
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.sampling.token_logprob import TokenLogprob

FinishReason = Literal["stop_token", "grammar", "length", "cancelled", "fault", "unmet"]
"""``grammar``: the text is complete, nothing can follow. ``unmet``: its grammar and the request's other fields left no
token to choose, which is the request's fault and not the engine's."""


class Submit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A request enters the engine."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    emitted_ids: list[int] = []
    """Tokens that an earlier gang already gave to the client: replayed, not emitted again."""
    num_prompt_logprobs: int = 0
    """Prompt log-probabilities that it already gave, from position 1 on: not given again."""
    cache_salt: str = ""
    """Requests of different salts share no KV."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop a request and free its pages; unknown ids are ignored (the request may just have ended)."""

    request_id: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the gang: cancel what runs and leave the loop."""


ToGang = Submit | Cancel | Stop


class SpeculationCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What drafting did for one request, or for the server as a whole."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = []
    of_drafters: list[SpeculationCounters] = []
    """The parts of each drafter, up to the last that drafted; empty where it was the first one alone."""
    newest: int = 0
    """The drafter of the last round."""

    @property
    def by_drafter(self) -> list[SpeculationCounters]:
        """`of_drafters`, written out."""
        return self.of_drafters or [self]

    def without_acceptances(self, positions: range) -> SpeculationCounters:
        """Less one accepted draft of the last round at each of `positions`: what a client is not given counts as not
        accepted."""
        return msgspec.structs.replace(
            self,
            accepted=self.accepted - len(positions),
            accepted_per_position=[n - (p in positions) for p, n in enumerate(self.accepted_per_position)],
            of_drafters=[
                part.without_acceptances(positions) if drafter == self.newest else part
                for drafter, part in enumerate(self.of_drafters)
            ],
        )

    def plus(self, other: SpeculationCounters) -> SpeculationCounters:
        """Both together, `other` the later ones."""
        parts = zip_longest(self.by_drafter, other.by_drafter, fillvalue=SpeculationCounters())
        return SpeculationCounters(
            rounds=self.rounds + other.rounds,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            accepted_per_position=[
                sum(pair) for pair in zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
            ],
            of_drafters=[one.plus(two) for one, two in parts] if self.of_drafters or other.of_drafters else [],
            newest=other.newest if other.rounds else self.newest,
        )


STEP_SECONDS_BOUNDS = (0.001, 0.002, 0.004, 0.008, 0.012, 0.016, 0.024, 0.032, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
BATCH_SIZE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """How often values fell between the bounds of a histogram."""

    counts: list[int] = []
    """One for each bound, of the values that are at most it and above the one before; then of those above all. Empty
    without values."""
    total: float = 0.0
    """Sum of the values."""

    def plus(self, other: Distribution) -> Distribution:
        """Both together; over the same bounds."""
        return Distribution(
            counts=[sum(pair) for pair in zip_longest(self.counts, other.counts, fillvalue=0)],
            total=self.total + other.total,
        )


class SequenceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request in one step; the last delta of a request has `finish`."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """Those of the prompt positions that the step computed, in order; they come before the first token or with it."""
    finish: FinishReason | None = None
    matched_stop_id: int | None = None
    """Set when `finish` is stop_token; the stop id itself is the last of `token_ids`."""
    fault: str | None = None
    """Why, when `finish` is fault or unmet."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was present when the request first got its slot."""
    queue_seconds: float | None = None
    """From the request's arrival at rank 0 to its slot; in the first delta of those that got one."""
    speculation: SpeculationCounters | None = None
    """Totals of the request so far: a stop string may make any delta the last one."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engine after a step."""

    step: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    """Since the start."""
    pages_in_use: dict[str, int]
    """By KV group."""
    pages_total: dict[str, int]
    prompt_tokens: int
    """Since the start, computed prompt rows (recomputation included)."""
    generated_tokens: int
    last_step_seconds: float
    speculation: SpeculationCounters
    draft_seconds: float = 0.0
    """Spent drafting since the start."""
    verify_seconds: float = 0.0
    """Spent in the target's forward passes and the choice of tokens since the start."""
    gap_seconds: float = 0.0
    """Between one cycle's end on the device and the next one's beginning, since the start; idle waits not counted."""
    compiled_programs: int = 0
    """Triton programs that rank 0 has compiled since it was ready: 0 in steady serving."""
    prefix_cache_queries: int = 0
    """Since the start, tokens of requests that got their slots, for the first time or again: what the prefix cache was
    asked for."""
    prefix_cache_hits: int = 0
    """Tokens of them whose KV it had."""
    prefix_cache_evictions: int = 0
    """Pages that it had to give up since the start."""
    pages_cached: dict[str, int] = {}
    """By KV group: pages that it can find, held by requests or not."""
    step_seconds: Distribution = Distribution()
    """Durations of steps with rows since the start, over `STEP_SECONDS_BOUNDS`."""
    batch_sizes: Distribution = Distribution()
    """Their sequences, over `BATCH_SIZE_BOUNDS`."""


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """Everything that one step gave, in one message; with no deltas it is a heartbeat."""

    deltas: list[SequenceDelta]
    stats: EngineStats


class GangFailed(msgspec.Struct, frozen=True, tag=True):
    """The loop of rank 0 ended with an error."""

    reason: str


class Compiling(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 begins to compile a program, which may take longer than a step: a sign of life."""


FromGang = StepOutput | Compiling | GangFailed


class Choice(msgspec.Struct, frozen=True):
    """A decision taken at start-up and its reason, for `gemray info`."""

    what: str
    chosen: str
    reason: str


class KVGroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One KV group as built on a rank."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    page_size: int
    num_pages: int
    """Pages that sequences can own (the null page not counted)."""
    page_bytes: int


class DrafterInfo(msgspec.Struct, frozen=True):
    """One drafter of the gang."""

    method: str
    kv: str
    """``shared`` with the target, or its ``own``."""
    placement: str
    num_draft_tokens: int
    """Most of a step."""
    checkpoint: CheckpointIdentity


class MemoryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory of a rank's device is, in bytes; the parts below `total` add up to it."""

    total: int
    """All of the card; on CPU of the host, or of the process's control group."""
    weights: int
    """The target's shard, or what a dedicated drafter's rank holds of it."""
    drafter: int
    kv: int
    """Pages of all groups."""
    graphs: int
    work: int
    """Working memory of the largest step, whether it has been taken yet or not."""
    elsewhere: int
    """CUDA's and NCCL's own memory, and other processes."""
    headroom: int
    """Free, and left so."""
    kv_budget: int
    """What the pages could take: as configured, or as found at start."""


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds once it has loaded."""

    rank: int
    role: Literal["target", "drafter"] = "target"
    host: str
    device: str
    shard_indices: dict[str, int]
    """The fields and derived counts of `ShardIndices`, by name."""
    weight_bytes: int
    """Bytes of the target's shard, the drafter's, or both, as the rank holds them."""
    kv_groups: list[KVGroupInfo]
    memory: MemoryInfo | None = None
    load_seconds: dict[str, float] = {}
    """What the parts of its load took, in their order (`gemray_workers.rank.load_laps`)."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, the same on every rank."""

    model_type: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    layer_types: list[str]
    vocab_size: int
    max_model_len: int
    """As fitted to the KV memory: what the server accepts."""
    max_position_embeddings: int
    dtype: str
    tensor_parallel_size: int
    sliding_window: int
    choices: list[Choice]
    """Attention backends and the like, each with its reason."""
    drafter_method: str = "none"
    """With two drafters ``mtp+dflash``, and what follows is of both: own KV beside the target's, the most drafts."""
    drafter_kv: str = "none"
    """``shared`` with the target, or its ``own``."""
    drafter_placement: str = "colocated"
    num_draft_tokens: int = 0
    drafters: list[DrafterInfo] = []
    """Each one."""
    checkpoint: CheckpointIdentity
    """Ranks that found different ones on their nodes are no gang."""
    drafter_checkpoint: CheckpointIdentity | None = None
    numerics: str = "fast"
    """As in `EngineConfig`."""
    prefix_cache: bool = False
    """Whether the KV of what a request shares with an earlier one is found again."""


class GangInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A gang that is ready to serve."""

    model: ModelInfo
    ranks: list[RankInfo]
    """One a rank, in rank order."""
