"""What to measure: one engine setup and the batches to run through it."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from gemray_workers.config import DeviceName, DTypeName, EngineConfig, MethodName, PlacementName
from gemray_workers.errors import InvalidField

KV_MEMORY = 12 << 30
"""A cap: pools take no more pages than the batch can fill."""
MAX_STEP_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine and its batches."""

    name: str
    model: str
    """A directory; with `random_weights` its config.json is enough."""
    drafter: str | None = None
    method: MethodName = "auto"
    draft_tokens: int | None = None
    drafter_placement: PlacementName = "colocated"
    tp: int = 1
    dtype: DTypeName = "bfloat16"
    device: DeviceName = "cuda"
    batch: tuple[int, ...] = (1, 8)
    prompt_len: int = 512
    steps: int = 32
    warm_up_steps: int = 4
    prefills: int = 3
    """Prefill runs of each batch; the first only warms up."""
    acceptance_length: float | None = None
    """Tokens that each cycle is made to give on average; None leaves it to the drafter."""
    random_weights: bool = False
    sampling: Literal["greedy", "published"] = "greedy"
    """``published`` draws as the checkpoints' generation_config says: T 1, top_k 64, top_p 0.95, two ids forbidden."""
    enforce_eager: bool = False
    lag: int = 0
    kv_memory: int = KV_MEMORY
    page_size: int = 16
    profile: bool = False
    deadline_s: float = 300.0
    """For the whole setup, loading included."""

    def __post_init__(self) -> None:
        for name in ("prompt_len", "steps", "warm_up_steps", "prefills"):
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "an integer >= 1")
        if self.sampling not in ("greedy", "published"):
            raise InvalidField("sampling", self.sampling, "greedy or published")
        if not self.batch or min(self.batch) < 1:
            raise InvalidField("batch", self.batch, "integers >= 1")
        if self.draft_tokens and self.drafter is None:
            raise InvalidField("draft_tokens", self.draft_tokens, "unset or 0, as there is no drafter")
        if self.acceptance_length is None:
            return
        if not self.random_weights:
            raise InvalidField(
                "acceptance_length",
                self.acceptance_length,
                "unset, except with random weights: text made of drafts that nobody verified is wrong",
            )
        if self.acceptance_length < 1:
            raise InvalidField("acceptance_length", self.acceptance_length, "a number >= 1")

    @classmethod
    def of(cls, values: Mapping[str, Any], origin: str) -> Setup:
        """From a table of a suite's file; raises InvalidField."""
        known = {f.name: f for f in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidField(name, values[name], f"one of {', '.join(known)} (in {origin})")
        for name, field in known.items():
            if field.default is MISSING and name not in values:
                raise InvalidField(name, None, f"set (in {origin})")
        batch = values.get("batch", cls.batch)
        return cls(**{**values, "batch": tuple(batch) if isinstance(batch, list | tuple) else (batch,)})

    @property
    def gang_size(self) -> int:
        """Processes."""
        return self.tp + (self.drafter_placement == "dedicated")

    def engine_config(self) -> EngineConfig:
        """The engine's settings: room for the largest batch and no more."""
        drafts = 0 if self.drafter is None or self.method == "none" else (self.draft_tokens or 16)
        each = drafts + 1 if self.acceptance_length is None else math.ceil(self.acceptance_length)
        cycles = self.warm_up_steps + self.steps + 8
        return EngineConfig(
            model_path=self.model,
            tensor_parallel_size=self.tp,
            dtype=self.dtype,
            device=self.device,
            kv_memory_bytes=self.kv_memory,
            max_model_len=self.prompt_len + cycles * each + drafts + 1,
            max_num_seqs=max(self.batch),
            max_step_tokens=max(MAX_STEP_TOKENS, max(self.batch) * (drafts + 1)),
            prefill_chunk=self.prompt_len,
            page_size=self.page_size,
            drafter_path=self.drafter,
            method=self.method,
            max_draft_tokens=self.draft_tokens,
            drafter_placement=self.drafter_placement,
            random_weights=self.random_weights,
            enforce_eager=self.enforce_eager,
            capture="use",
            lag=self.lag,
        )


def read_suite(path: Path, changes: Mapping[str, Any], only: Sequence[str] = ()) -> list[Setup]:
    """Setups of a TOML file: ``[[setup]]`` tables over an optional ``[defaults]``; relative paths start at the file.

    Args:
        path: the file.
        changes: values that win over the file's.
        only: names of the setups wanted; all if empty.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidField("suite", str(path), f"a readable TOML file ({error})") from error
    setups = []
    for table in content.get("setup", []):
        values = {**content.get("defaults", {}), **table, **changes}
        for name in ("model", "drafter"):
            if values.get(name):
                values[name] = str(path.parent / values[name])
        setups.append(Setup.of(values, str(path)))
    if not setups:
        raise InvalidField("suite", str(path), "a file with [[setup]] tables")
    names = [setup.name for setup in setups]
    if unknown := [name for name in only if name not in names]:
        raise InvalidField("only", unknown[0], "one of " + ", ".join(names))
    return [setup for setup in setups if not only or setup.name in only]
