"""Settings of a gang: frozen, validated once, the same on every rank."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch

from gemray_workers.errors import InvalidField
from gemray_workers.ranges import AT_LEAST_ONE, DURATION, NOT_NEGATIVE, POSITIVE, SHARE, Range, check_ranges, ranged

DTypeName = Literal["bfloat16", "float32", "float64"]
KVDTypeName = Literal["auto", "fp8_e4m3"]
DeviceName = Literal["cpu", "cuda"]
MethodName = Literal["auto", "none", "mtp", "dflash"]
DFlashCausalName = Literal["config", "sliding", "all", "none"]
PlacementName = Literal["colocated", "dedicated"]
CaptureName = Literal["start", "use"]
AllReduceName = Literal["auto", "library"]
NumericsName = Literal["fast", "exact"]

USUAL_STEP_TOKENS = 512
"""Rows of one forward pass where nothing asks for more."""

LEAST_USUAL_CHUNK = 256
"""Prompt rows of one sequence in a step where nothing asks for more."""

_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

_NAMES: dict[str, tuple[str, ...]] = {
    "dtype": get_args(DTypeName),
    "kv_dtype": get_args(KVDTypeName),
    "device": get_args(DeviceName),
    "method": get_args(MethodName),
    "drafter_placement": get_args(PlacementName),
    "dflash_causal": get_args(DFlashCausalName),
    "capture": get_args(CaptureName),
    "all_reduce": get_args(AllReduceName),
    "numerics": get_args(NumericsName),
}


@dataclass(frozen=True)
class KVMemory:
    """Bytes of KV pages on each rank of a gang, all groups together."""

    target: int
    """On a rank of the target; its drafters' groups are among them unless the drafter has a rank of its own."""
    drafter: int
    """On that rank; where there is none, as `target`."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What every rank of a gang must agree on."""

    model_path: str
    """A local Hugging Face directory of a Gemma 4 model."""
    tensor_parallel_size: int = ranged(AT_LEAST_ONE)
    dtype: DTypeName
    device: DeviceName
    numerics: NumericsName = "fast"
    """``exact``: every row of the target has the same bits whatever else runs, on 1, 2, 4 or 8 ranks. ``fast``: sums
    follow the shape of the work."""
    kv_memory_bytes: int | None = ranged(AT_LEAST_ONE, None)
    """Bytes of KV pages on each rank, all groups together. None finds them at start: what is free once everything else
    has its memory (`rank.kv_room`)."""
    gpu_memory_utilization: float = ranged(SHARE, 0.9)
    """With None as `kv_memory_bytes`: the part of a card's memory that a rank's process may take, all in all."""
    most_kv_memory: KVMemory | None = None
    """With None as `kv_memory_bytes`: what an earlier gang found, in whose place this one comes and whose requests it
    goes on with. It is not exceeded."""
    kv_dtype: KVDTypeName = "auto"
    """What the target's pages hold: ``auto`` is `dtype`; ``fp8_e4m3`` is half of bfloat16's bytes, scaled by what the
    checkpoint says, else by 1. A drafter's own pages hold `dtype`."""
    max_model_len: int | None = ranged(Range(2), None)
    """Most tokens of a sequence, prompt and output; None asks for the model's own maximum. The engine serves
    the largest length that also fits the KV memory."""
    max_num_seqs: int = ranged(AT_LEAST_ONE, 32)
    """Sequences that hold pages at one time."""
    max_step_tokens: int | None = ranged(AT_LEAST_ONE, None)
    """Rows of one forward pass, all sequences together; None is 512, or more where `max_num_seqs` sequences with all
    their drafts and a prompt chunk take more."""
    prefill_chunk: int | None = ranged(AT_LEAST_ONE, None)
    """Most prompt rows of one sequence in a step. None takes `LEAST_USUAL_CHUNK`, and on cards more where they compute
    more in the time that others' decoding may wait (`engine.prompt_room.usual_chunk`); `rank.blueprint` settles it."""
    page_size: int = ranged(AT_LEAST_ONE, 16)
    """Tokens a page."""
    prefix_cache: bool = True
    """Keep the pages of texts until their memory is wanted, and start requests behind the beginnings that are there."""
    attention_backend: str | None = None
    """None lets the engine choose; an explicit choice is never replaced."""
    drafter_path: str | None = None
    """A local directory of an MTP assistant or a DFlash drafter."""
    second_drafter_path: str | None = None
    """One of the other kind, beside it."""
    method: MethodName = "auto"
    """``auto`` is what the drafter's config says, or none without a drafter; with two of them all but none."""
    num_draft_tokens: int | None = ranged(NOT_NEGATIVE, None)
    """Most drafts of a sequence in a step, with two drafters of either one; None is the drafter's usual number: 4 for
    MTP, as published, and the whole block for DFlash."""
    adapt_draft_tokens: bool = False
    """Draft as many tokens as measured acceptance and step times justify, at most `num_draft_tokens`, so
    with None at most the drafter's usual number."""
    drafter_placement: PlacementName = "colocated"
    """``dedicated`` gives a DFlash drafter a worker, and device, of its own."""
    drafter_attention_backend: str | None = None
    """A drafter that reads the target's KV always has the target's."""
    mtp_position_delta: int = ranged(Range(-1, 0), 0)
    """0: drafts stand at the newest token's position; -1: at the one before (spec 4.3)."""
    dflash_input_scale: float | None = ranged(POSITIVE, None)
    """Multiplies the raw embedding of a block's tokens; None is the checkpoint's, else the target's scale."""
    dflash_causal: DFlashCausalName = "config"
    """Which DFlash layers hide a block's later rows from its earlier ones: ``config`` is what the checkpoint says,
    else the sliding layers (spec 5.4)."""
    random_weights: bool = False
    """Seeded random weights for target and drafter instead of those on disk: only the configs are read."""
    enforce_eager: bool = False
    """On CUDA, run cycles kernel by kernel instead of as graphs."""
    capture: CaptureName = "start"
    """When graphs are captured: all at ``start``, so that nothing compiles while serving, or each at its first
    ``use``, for measurements of a few shapes."""
    all_reduce: AllReduceName = "auto"
    """How cards add up what each of them has: ``auto`` takes one kernel of our own for small sums where it can and its
    self-test passes, ``library`` always the library's (NCCL), for measurements."""
    lag: int = ranged(Range(0, 1), 1)
    """Steps that may be in flight while the next one is planned: 1, so that the device never waits for the host, or 0.
    Tokens are the same."""
    poison_freed_pages: bool = False
    """Fill freed pages with NaN (debugging): a read of a freed page then cannot go unnoticed."""
    collective_timeout_s: float = ranged(DURATION, 60.0)
    """How long a rank waits for its peers in a step before it gives up."""
    start_deadline_s: float = ranged(DURATION, 900.0)
    """How long it waits for them until the gang serves: to join, to load and to warm up."""

    hf_configs: MutableMapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What config.json files say (`checkpoint.hf_config`): ranks take from it what they find in it, as some files leave
    fields to transformers' defaults, which takes 4.5 s of CPU time to import."""

    def __post_init__(self) -> None:
        check_ranges(self)
        for name, allowed in _NAMES.items():
            if getattr(self, name) not in allowed:
                raise InvalidField(name, getattr(self, name), "one of " + ", ".join(allowed))
        if self.drafter_placement == "dedicated" and (self.drafter_path is None or self.method == "none"):
            raise InvalidField("drafter_placement", "dedicated", "colocated, as there is no drafter")
        if self.second_drafter_path is not None and self._is_one_drafter_twice():
            raise InvalidField(
                "second_drafter_path",
                self.second_drafter_path,
                "two of different kinds, an MTP assistant and a DFlash drafter: this is the first one again",
            )
        if self.drafter_placement == "dedicated" and self.second_drafter_path is not None:
            raise InvalidField(
                "drafter_placement",
                "dedicated",
                "colocated, as there are two drafters: both run inside the model's ranks",
            )

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch names it."""
        return _DTYPES[self.dtype]

    @property
    def torch_kv_dtype(self) -> torch.dtype:
        """The dtype of the target's pages."""
        return torch.float8_e4m3fn if self.kv_dtype == "fp8_e4m3" else self.torch_dtype

    @property
    def drafter_paths(self) -> tuple[str, ...]:
        """The drafters' directories."""
        return tuple(path for path in (self.drafter_path, self.second_drafter_path) if path is not None)

    def _is_one_drafter_twice(self) -> bool:
        return len({os.path.realpath(path) for path in self.drafter_paths}) < len(self.drafter_paths)

    @property
    def gang_size(self) -> int:
        """Processes of the gang: the target's ranks, and the drafter's when it has a worker of its own."""
        return self.tensor_parallel_size + (self.drafter_placement == "dedicated")

    def step_tokens(self, num_draft_tokens: int) -> int:
        """Rows of one forward pass: as configured, else enough for a drafter of `num_draft_tokens` drafts."""
        if self.max_step_tokens is not None:
            return self.max_step_tokens
        return max(USUAL_STEP_TOKENS, self.max_num_seqs * (1 + num_draft_tokens) + self.chunk)

    @property
    def chunk(self) -> int:
        """`prefill_chunk`, once it is settled."""
        assert self.prefill_chunk is not None, "Blueprint.of settles it"
        return self.prefill_chunk

    def num_draft_tokens_within(self, usual: int, limit: int) -> int:
        """How many drafts a step may have, for a drafter that makes `usual` ones and at most `limit`.

        Raises:
            InvalidField: more were asked for than the drafter can make.
        """
        if self.num_draft_tokens is None:
            return usual
        if self.num_draft_tokens > limit:
            raise InvalidField("num_draft_tokens", self.num_draft_tokens, f"0 to {limit}, what this drafter can make")
        return self.num_draft_tokens
