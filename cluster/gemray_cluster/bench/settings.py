"""What to measure: one engine setup and the work to run through it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gemray_cluster.bench.load import Load
from gemray_cluster.bench.names import check_names
from gemray_cluster.bench.sampling import SamplingName
from gemray_workers.checkpoint.json_file import read_json_object
from gemray_workers.config import (
    AllReduceName,
    DeviceName,
    DTypeName,
    EngineConfig,
    KVDTypeName,
    MethodName,
    NumericsName,
    PlacementName,
)
from gemray_workers.drafters.formats import served_format
from gemray_workers.errors import InvalidField
from gemray_workers.sampling.params import DraftMethod

MOST_EXTRA_STEPS = 8
"""Steps of a batch beside those that are timed: in flight when it ends, or watched instead."""
MAX_STEP_TOKENS = 4096
_LISTS = ("drafter", "draft_method", "batch", "sampling", "lag", "prefill")
"""Settings that may also be given as one value."""


@dataclass(frozen=True, kw_only=True)
class Decode:
    """A batch that decodes; one row."""

    batch: int
    sampling: SamplingName
    lag: int
    draft_method: DraftMethod = "auto"

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.sampling}, lag {self.lag}{_named(self.draft_method)}"


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """One prompt, to its first token; one row."""

    num_tokens: int

    def __str__(self) -> str:
        return f"prompt of {self.num_tokens}"


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Requests that arrive at a rate; one row."""

    load: Load
    per_s: float
    draft_method: DraftMethod = "auto"

    def __str__(self) -> str:
        return f"{self.per_s:g} requests/s{_named(self.draft_method)}"


def _named(draft_method: DraftMethod) -> str:
    return "" if draft_method == "auto" else f", {draft_method} named"


Work = Decode | Prefill | Rate


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine, loaded once, and its work: rows of batches, of prompts, and of requests that arrive at a rate."""

    name: str
    model: str
    """A directory; with `random_weights` its config.json is enough."""
    drafter: tuple[str, ...] = ()
    """Directories: one, or those of an MTP assistant and a DFlash drafter."""
    draft_method: tuple[DraftMethod, ...] = ("auto",)
    """What requests name: a drafter of the setup, ``none``, or ``auto``, which leaves the choice to the engine. Rows of
    batches and of rates are measured with each."""
    method: MethodName = "auto"
    draft_tokens: int | None = None
    drafter_placement: PlacementName = "colocated"
    tp: int = 1
    dtype: DTypeName = "bfloat16"
    device: DeviceName = "cuda"
    numerics: NumericsName = "fast"
    batch: tuple[int, ...] = (1, 8)
    sampling: tuple[SamplingName, ...] = ("greedy",)
    """``published`` draws as the checkpoints' generation_config says: T 1, top_k 64, top_p 0.95, two ids forbidden."""
    lag: tuple[int, ...] = (1,)
    prefill: tuple[int, ...] = ()
    """Lengths of prompts that are measured alone."""
    load: Load | None = None
    """Requests that arrive by themselves; a row for each of its rates."""
    max_num_seqs: int | None = None
    """Sequences at one time; None is the largest batch."""
    max_step_tokens: int = MAX_STEP_TOKENS
    """Rows of a step, raised to those of the largest batch and its drafts."""
    prefill_chunk: int | None = None
    """Most prompt rows of one sequence in a step; None takes whole prompts, up to `max_step_tokens`."""
    prompt_len: int = 512
    """Tokens of each prompt of a batch."""
    steps: int = 32
    warm_up_steps: int = 4
    prefills: int = 3
    """Prefill runs of each batch; the first only warms up. With one alone the run that decodes is taken, in which time
    to capture its cycles may be part of it."""
    acceptance_length: float | None = None
    """Tokens that each cycle is made to give on average; None leaves it to the drafter."""
    random_weights: bool = False
    enforce_eager: bool = False
    all_reduce: AllReduceName = "auto"
    """``library`` leaves all sums over ranks to NCCL."""
    kv_memory: int | None = None
    """Bytes a rank; None is what the largest batch and the longest prompt take (`kv_memory.with_kv_memory`)."""
    kv_dtype: KVDTypeName = "auto"
    page_size: int = 16
    profile: bool = False
    deadline_s: float = 300.0
    """For the whole setup, loading included."""

    def __post_init__(self) -> None:
        self._check_single_values()
        if unknown := [name for name in self.sampling if name not in get_args(SamplingName)]:
            raise InvalidField("sampling", unknown[0], "greedy or published")
        for name in ("batch", "prefill"):
            if any(value < 1 for value in getattr(self, name)):
                raise InvalidField(name, getattr(self, name), "integers >= 1")
        largest = max(self.batch, default=1)
        if self.max_num_seqs is not None and self.max_num_seqs < largest:
            raise InvalidField("max_num_seqs", self.max_num_seqs, f"unset, or at least {largest}, the largest batch")
        if any(lag not in (0, 1) for lag in self.lag):
            raise InvalidField("lag", self.lag, "0 or 1, or both")
        if not self.work:
            raise InvalidField("batch", self.batch, "integers >= 1, or empty with prompts or a load to measure")
        self._check_drafters()
        if self.acceptance_length is None:
            return
        if not self.random_weights:
            raise InvalidField(
                "acceptance_length",
                self.acceptance_length,
                "unset, except with random weights: text made of unverified drafts is wrong",
            )
        if self.acceptance_length < 1:
            raise InvalidField("acceptance_length", self.acceptance_length, "a number >= 1")

    def _check_single_values(self) -> None:
        if "/" in self.name:
            raise InvalidField("name", self.name, "a text without /: files of profiles have it in their names")
        for name in ("prompt_len", "steps", "warm_up_steps", "prefills", "max_step_tokens", "prefill_chunk"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidField(name, value, "an integer >= 1")
        if self.deadline_s <= 0:
            raise InvalidField("deadline_s", self.deadline_s, "a number > 0")

    def _check_drafters(self) -> None:
        if len(self.drafter) > 2:
            raise InvalidField("drafter", ", ".join(self.drafter), "one, or one MTP assistant and one DFlash drafter")
        if unknown := [name for name in self.draft_method if name not in get_args(DraftMethod)]:
            raise InvalidField("draft_method", unknown[0], f"one of {', '.join(get_args(DraftMethod))}")
        if self.draft_tokens and not self.drafter:
            raise InvalidField("draft_tokens", self.draft_tokens, "unset or 0, as there is no drafter")

    @classmethod
    def of(cls, values: Mapping[str, Any], origin: str) -> Setup:
        """From a table of a suite's file; raises InvalidField."""
        check_names(cls, values, origin)
        lists = {name: values[name] for name in _LISTS if name in values}
        return cls(**{**values, **{n: tuple(v) if isinstance(v, list | tuple) else (v,) for n, v in lists.items()}})

    @property
    def work(self) -> tuple[Work, ...]:
        """Every row, in the order in which they are measured."""
        decodes = (
            Decode(batch=batch, sampling=sampling, lag=lag, draft_method=draft_method)
            for draft_method in self.draft_method
            for lag in self.lag
            for sampling in self.sampling
            for batch in self.batch
        )
        prefills = (Prefill(num_tokens=num_tokens) for num_tokens in self.prefill)
        return (*decodes, *prefills, *(() if self.load is None else self._rates(self.load)))

    def _rates(self, load: Load) -> Iterator[Rate]:
        for draft_method in self.draft_method:
            for per_s in load.rates:
                yield Rate(load=load, per_s=per_s, draft_method=draft_method)

    @property
    def gang_size(self) -> int:
        """Processes."""
        return self.tp + (self.drafter_placement == "dedicated")

    def require_files(self) -> None:
        """Raise InvalidField where a directory holds no model, or a row names a drafter that the setup does not have:
        now, and not after processes have started."""
        for name, directory in (("model", self.model), *(("drafter", directory) for directory in self.drafter)):
            if not (Path(directory) / "config.json").is_file():
                raise InvalidField(name, directory, "a directory with a config.json, or the name of an embedded model")
        self.engine_config()  # refuses what two drafters cannot be together
        directories = () if self.method == "none" else map(Path, self.drafter)
        kinds = [served_format(read_json_object(path / "config.json"), path) for path in directories]
        allowed = ("auto", "none", *sorted(kinds))
        if unknown := [name for name in self.draft_method if name not in allowed]:
            raise InvalidField("draft_method", unknown[0], f"one of {', '.join(allowed)}: drafters of the setup")

    @property
    def batch_len(self) -> int:
        """Most tokens of a sequence of a batch: its prompt, and as many cycles as a run may take.

        While the last prompts of a batch are computed the first sequences decode, so prompts take cycles, too: twice as
        many as whole steps of them, since drafts may take half of a step's rows.
        """
        prompts = -(-2 * max(self.batch, default=0) * self.prompt_len // self.max_step_tokens)
        cycles = self.warm_up_steps + self.steps + MOST_EXTRA_STEPS + prompts
        each = self._most_drafts + 1 if self.acceptance_length is None else math.ceil(self.acceptance_length)
        return self.prompt_len + cycles * each

    @property
    def _most_drafts(self) -> int:
        return 0 if not self.drafter or self.method == "none" else (self.draft_tokens or 16)

    def engine_config(self) -> EngineConfig:
        """The engine's settings: room for the largest batch and the longest prompt, and no more."""
        max_num_seqs = self.max_num_seqs or max(self.batch, default=1)
        max_step_tokens = max(self.max_step_tokens, max_num_seqs * (self._most_drafts + 1))
        prompts = (self.prompt_len, *self.prefill, *(() if self.load is None else self.load.prompt.tokens))
        decoded = self.batch_len if self.batch else 0
        longest = 0 if self.load is None else self.load.longest
        return EngineConfig(
            model_path=self.model,
            tensor_parallel_size=self.tp,
            dtype=self.dtype,
            device=self.device,
            numerics=self.numerics,
            kv_memory_bytes=self.kv_memory,
            kv_dtype=self.kv_dtype,
            max_model_len=max(decoded, longest, *self.prefill) + self._most_drafts + 2,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            prefill_chunk=self.prefill_chunk or min(max(prompts), max_step_tokens),
            page_size=self.page_size,
            drafter_path=next(iter(self.drafter), None),
            second_drafter_path=next(iter(self.drafter[1:]), None),
            method=self.method,
            num_draft_tokens=self.draft_tokens,
            drafter_placement=self.drafter_placement,
            random_weights=self.random_weights,
            enforce_eager=self.enforce_eager,
            all_reduce=self.all_reduce,
            # Requests of a load come in every shape; a row of the others needs a few shapes alone.
            capture="use" if self.load is None else "start",
            lag=max(self.lag, default=0),
            prefix_cache=False,  # the same prompts run again and again, to be computed
        )
