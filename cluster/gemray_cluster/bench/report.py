"""What a benchmark found, as it is written to JSON. Times are milliseconds unless named otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Self

import msgspec


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one quantity."""

    median: float
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Summarise at least one sample."""
        deciles = quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else [samples[0]] * 9
        return cls(median=median(samples), p10=deciles[0], p90=deciles[8], samples=len(samples))


def served_as(model: str, numerics: str, kv_dtype: str) -> str:
    """A model's name, for people, with what it is served otherwise than by default: ``31B-it (exact, fp8_e4m3 KV)``."""
    others = [numerics] if numerics != "fast" else []
    if kv_dtype != "auto":
        others.append(f"{kv_dtype} KV")
    return f"{model} ({', '.join(others)})" if others else model


class ExpertsTouched(msgspec.Struct, frozen=True, kw_only=True):
    """Different experts of a layer that one step of the whole batch reads, over all layers and a few steps."""

    mean: float
    least: int
    most: int
    num_experts: int
    """A layer's."""
    steps: int


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """The least a cycle can take: the weights that it needs, read once, on the rank that reads most."""

    target_bytes: int
    drafter_bytes: int
    """All draft steps of a cycle together, the target's head included where the drafter uses it."""
    experts_touched: float | None
    """Experts of each layer: as counted on rank 0, else as expected where rows choose independently; None without
    experts."""
    bandwidth: float
    """Bytes a second: the fastest that the process has read 2 GiB of the same device so far, in any of several ways; in
    reports from before `sum_ms` was written down, by a sum alone."""
    ms: float
    sum_bandwidth: float | None = None
    """Bytes a second of a sum over all of the 2 GiB, at best."""
    sum_ms: float | None = None
    """As `ms`, at that rate: what bars, targets and peers' floors are stated by."""

    @property
    def stated_ms(self) -> float:
        """The floor at the rate that bars, targets and peers' floors are stated by."""
        return self.ms if self.sum_ms is None else self.sum_ms


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One engine with one batch."""

    name: str
    model: str
    method: str
    """The drafter that drafts; ``mtp+dflash`` where the engine chooses between both."""
    drafter: str | None
    """The setup's, two of them as ``NAME + NAME``."""
    draft_method: str = "auto"
    """What the requests name."""
    rounds: dict[str, int] = {}
    """How often each drafter drafted for a sequence in the measured steps, by its method; empty where there is one."""
    placement: str
    tp: int
    dtype: str
    numerics: str = "fast"
    kv_dtype: str = "auto"
    """What KV pages are of, as the setup says it; as in reports from before it was written down, ``auto``."""
    draft_tokens: int
    batch: int
    sampling: str
    """``greedy``, or ``published``: drawn as the checkpoints' generation_config says."""
    lag: int
    """Steps in flight while the host plans the next one."""
    prompt_len: int
    steps: int
    acceptance_asked: float | None
    """Set for the measurement; None where the drafter's own drafts were verified."""
    acceptance_length: float
    """Tokens of a sequence in a cycle."""
    prefill: Spread
    """From the requests' arrival to the last one's first token."""
    step: Spread
    """A cycle, or a plain decode step: from one publication to the next."""
    draft: Spread
    verify: Spread
    """The target's forward pass and the choice of tokens."""
    gap: Spread
    """What the device waits between the end of one cycle and the beginning of the next, by events on its stream."""
    rest: Spread
    """The remainder of the step without draft and verify, the gap included."""
    tokens_per_s: float
    """Tokens of the whole batch, over the measured steps."""
    busy_ms: float | None = None
    """Time of a cycle that rank 0's device computes, collectives left out, by a profile of a few; None where none was
    made, or on CPU. It hardly depends on the host, whose launches decide how long a step takes without a graph."""
    busiest: dict[str, float] = {}
    """Kernels that take most of those cycles, in milliseconds of one, by their names; where one begins before the last
    has ended, they add up to more than `busy_ms`. Empty where no profile was made."""
    experts: ExpertsTouched | None = None
    """None for a model without experts."""
    floor: Floor
    read_after: float | None = None
    """Bytes a second of that sum right after these steps, beside the loaded model; None where there was no memory for
    it."""
    weight_bytes: int
    """Bytes on rank 0, its part of a drafter's included."""
    peak_memory_bytes: int
    """Peak of rank 0's device, probes left out; 0 on CPU."""
    load_s: float
    choices: dict[str, str]
    """Attention backends and the like."""
    device: str

    @property
    def served(self) -> str:
        """As `served_as`."""
        return served_as(self.model, self.numerics, self.kv_dtype)

    @property
    def drafting(self) -> str:
        """Who drafts, and how many tokens at most, for people; with two drafters also what each did."""
        method = f"{self.method} {self.draft_tokens}" if self.draft_tokens else self.method
        if self.draft_method != "auto":
            return f"{method}, named"
        rounds = ", ".join(f"{name} {count}" for name, count in self.rounds.items())
        return f"{method} (rounds: {rounds})" if rounds else method


class PrefillFloor(msgspec.Struct, frozen=True, kw_only=True):
    """The least a prompt can take: its products at the rate of the matrix units, or the weights read once if that is
    longer. The rate is of a moment; no second of products keeps it (`sustained_rate`)."""

    operations: int
    """Twice the parameters that a token meets, for every token, on the rank measured. Attention itself, embeddings and
    the head are left out; behind the last layer that owns KV, or that a drafter captures, one token is counted."""
    matrix_rate: float
    """Operations a second: the most that the process has measured of the same device so far."""
    weight_bytes: int
    """All experts among them."""
    bandwidth: float
    """Bytes a second."""
    ms: float
    sustained_rate: float | None = None
    """Operations a second that the same product kept over a second; None in reports from before it was measured."""
    sustained_ms: float | None = None
    """As `ms`, at that rate."""


class PrefillRow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine with one prompt, alone."""

    name: str
    model: str
    method: str
    tp: int
    dtype: str
    numerics: str = "fast"
    kv_dtype: str = "auto"
    """As in `Row`."""
    num_tokens: int
    chunk: int
    """Most rows of a step."""
    first_token: Spread
    """From the request's arrival to its first token."""
    tokens_per_s: float
    floor: PrefillFloor
    device: str

    @property
    def served(self) -> str:
        """As `served_as`."""
        return served_as(self.model, self.numerics, self.kv_dtype)


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of many samples of one quantity."""

    p50: float
    p99: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Summarise at least one sample; p99 of fewer than a hundred lies between the two largest."""
        hundredths = quantiles(samples, n=100, method="inclusive") if len(samples) > 1 else [samples[0]] * 99
        return cls(p50=hundredths[49], p99=hundredths[98], samples=len(samples))


class RateRow(msgspec.Struct, frozen=True, kw_only=True):
    """An engine or a server under requests that arrive at random times."""

    name: str
    where: str
    """``engine`` for ranks in processes of their own, ``server`` for a running server."""
    method: str
    rate: float
    """Requests a second that arrive, on average."""
    sampling: str
    requests: int
    refused: int
    """Requests without a whole answer."""
    seconds: float
    """From the first second to the last token."""
    first_token: Percentiles | None
    """From a request's arrival; its time in the queue is part of it. None where no request was answered."""
    between_tokens: Percentiles | None
    """Tokens that came at once share the time since the ones before."""
    tokens_per_s: float
    good_share: float
    """Share of the requests whose first token came within its limit and the others within theirs on average."""
    goodput: float
    """Good requests a second."""
    first_token_limit_ms: float
    between_tokens_limit_ms: float
    prompts: dict[int, float] = {}
    """Tokens of a prompt, and the share of requests with so many; empty in reports from before it was written down."""
    outputs: dict[int, float] = {}
    """The same of answers."""
    device: str


AnyRow = Row | PrefillRow | RateRow


class OnlineRow(msgspec.Struct, frozen=True, kw_only=True):
    """A running server under a number of concurrent requests."""

    batch: int
    prompt_len: int
    max_tokens: int
    method: str
    first_token: Spread
    between_messages: Spread
    tokens_per_s: float
    acceptance_length: float | None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A setup that gave no rows, or not all."""

    name: str
    reason: str
    work: list[str] = []
    """The rows that it has none of: one that could not be measured, or all that were left when the engine failed."""


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Where a part of a setup's time went on rank 0, in seconds."""

    name: str
    """The setup's."""
    what: str
    """``probes``, ``load`` (processes and peers, weights, warm-up), or a row."""
    seconds: float
    programs: int
    """Triton programs compiled meanwhile, or read from the cache on disk."""
    compiling_s: float
    graphs: int
    """Cycles captured meanwhile."""
    capturing_s: float
    """Without compiling."""
    parts: dict[str, float] = {}
    """What each part of a load took; compiling and capturing are among them, and told once more above."""
    until_s: float = 0.0
    """When it ended, since the run began."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A setup's work so far from rank 0: its time, with a row or with why there is none, or with neither before the
    first row."""

    spent: Spent
    row: AnyRow | None = None
    trouble: str | None = None


class NotRun(msgspec.Struct, frozen=True, kw_only=True):
    """A row that a time limit left no time for."""

    name: str
    """The setup's."""
    work: str


class Report(msgspec.Struct, kw_only=True):
    """One run of `gemray bench`."""

    date: str
    """UTC, ISO 8601."""
    devices: list[str]
    versions: dict[str, str]
    settings: list[dict[str, object]]
    rows: list[Row] = []
    prefill: list[PrefillRow] = []
    online: list[OnlineRow] = []
    rates: list[RateRow] = []
    failures: list[Failure] = []
    time_limit_s: float | None = None
    not_run: list[NotRun] = []
    spent: list[Spent] = []
    """Every setup's parts in their order."""
    profiles: list[str] = []
    """Files beside the report."""
