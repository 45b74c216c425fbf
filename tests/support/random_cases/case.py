"""One random case: a target, a drafter, limits, requests, and what happens to them while they are served."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from gemray_workers.config import DTypeName, KVDTypeName, NumericsName
from gemray_workers.messages import Submit
from gemray_workers.sampling.params import DraftMethod
from support.checkpoints.kv_scales import with_kv_scales
from support.checkpoints.tiny import SHAPES, VOCAB_SIZE, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.random_requests import MAX_MODEL_LEN, random_requests

DrafterName = Literal["none", "mtp", "mtp-centroids", "dflash", "dedicated", "both"]
DRAFTERS: tuple[DrafterName, ...] = ("none", "mtp", "mtp-centroids", "dflash", "dedicated", "both")
DEDICATED_TP = (1, 2)
ORIGINALS: Mapping[NumericsName, int] = {"fast": 180, "exact": 10}
"""How many requests cases choose from; each is served alone once for every shape, which takes longer in exact numerics
than the cases do. Ten have every sampler, `min_tokens` and bad words among them."""
MAX_TOKENS = 28
_BLOCK_SIZES = (2, 4, 8, 16)
_NUM_DRAFTS: Mapping[DrafterName, Sequence[int]] = {
    "mtp": (1, 2, 3, 4, 5, 7),
    "mtp-centroids": (1, 2, 3, 4, 5, 7),
    "both": (7, 15),
}
METHODS: tuple[DraftMethod, ...] = ("auto", "auto", "mtp", "dflash", "none")


@dataclass(frozen=True)
class Limits:
    """How much an engine has to serve with."""

    num_slots: int
    max_model_len: int
    """Most often just what the longest request takes, or less: so pages are scarce, and the context limit is met."""
    prefill_chunk: int
    spare_rows: int
    """Rows of a step, beyond what every slot may draft in."""
    spare_pages: int | None
    """Pages of each KV group beyond one sequence of full length; None is plenty."""
    admission_headroom: int
    padded: bool
    """Run cycles in the shapes of graphs."""


@dataclass(frozen=True)
class Case:
    """All that is served and all that happens, drawn from one seed."""

    seed: int
    shape: Shape
    tp: int
    drafter: DrafterName
    kv_dtype: KVDTypeName
    numerics: NumericsName
    """``exact`` in float32, to the bit; ``fast`` in float64."""
    num_draft_tokens: int
    """Drafts of the drafter that makes the most."""
    lag: int
    limits: Limits
    submits: tuple[Submit, ...]
    originals: Mapping[str, int]
    """By request, the `original` whose text it cuts."""
    arrivals: Mapping[str, int]
    """By request, the step from which it is there."""
    cancels: Mapping[str, int]
    """By request, after how many tokens its client goes away, or finds its stop string."""
    ends: tuple[int, ...]
    """Steps after which the gang fails and another goes on with what had been given out."""

    @property
    def gang_size(self) -> int:
        """Processes."""
        return self.tp + (self.drafter == "dedicated")

    @property
    def dtype(self) -> DTypeName:
        """What the engine computes in."""
        return "float32" if self.numerics == "exact" else "float64"

    @property
    def directory(self) -> Path:
        """The target's checkpoint."""
        plain = tiny_checkpoint(self.shape)
        return plain if self.kv_dtype == "auto" else with_kv_scales(plain)

    @property
    def drafter_path(self) -> Path | None:
        """The drafter's."""
        match self.drafter:
            case "none":
                return None
            case "mtp" | "mtp-centroids":
                return tiny_assistant(self.directory, centroids=self.drafter == "mtp-centroids")
            case "dflash" | "dedicated" | "both":
                block_size = next(size for size in _BLOCK_SIZES if size > self.num_draft_tokens)
                return tiny_dflash(self.directory, block_size=block_size)

    @property
    def prefix_cache(self) -> bool:
        """Whether pages are found again: not in half of the cases of two drafters, which else find each other's."""
        return self.drafter != "both" or self.seed % 2 == 0

    @property
    def second_drafter_path(self) -> Path | None:
        """The MTP drafter's beside a DFlash one; both draft as many tokens as they do by themselves."""
        if self.drafter != "both":
            return None
        return tiny_assistant(self.directory, centroids=self.seed % 3 == 0)


def draw_case(
    seed: int, *, tp: int, drafter: DrafterName, kv_dtype: KVDTypeName = "auto", numerics: NumericsName = "fast"
) -> Case:
    """The case of a seed; TP and drafter are given, so that a sweep has as many of each as it wants."""
    rng = random.Random(f"{seed}/{tp}/{drafter}")
    k = 0 if drafter == "none" else rng.choice(_NUM_DRAFTS.get(drafter, (1, 3, 6, 7, 15)))
    crowded = rng.random() < 0.2
    originals = {f"r{i}": rng.randrange(ORIGINALS[numerics]) for i in range(rng.randint(3 if crowded else 1, 5))}
    submits = tuple(_cut(rng, original(number), name, k, crowded) for name, number in originals.items())
    if drafter == "both":
        submits = tuple(_with_method(submit, rng.choice(METHODS)) for submit in submits)
    names = list(originals)
    return Case(
        seed=seed,
        shape=rng.choice(SHAPES),
        tp=tp,
        drafter=drafter,
        kv_dtype=kv_dtype,
        numerics=numerics,
        num_draft_tokens=k,
        lag=rng.randrange(2),
        limits=_limits(rng, submits, crowded),
        submits=submits,
        originals=originals,
        arrivals={name: rng.choice((0, 0, rng.randrange(12))) for name in names},
        cancels={name: rng.randrange(8) for name in names if rng.random() < 0.15},
        ends=tuple(rng.randrange(1, 14) for _ in range(rng.choice((0, 0, 0, 1, 2)))),
    )


def _limits(rng: random.Random, submits: Sequence[Submit], crowded: bool) -> Limits:
    """Crowded is: many long outputs, and pages for little more than one of them."""
    longest = max(len(submit.prompt_ids) + submit.params.max_tokens for submit in submits) - rng.choice((0, 0, 1, 4))
    shortest = max(len(submit.prompt_ids) for submit in submits) + 1
    return Limits(
        num_slots=rng.randint(4 if crowded else 1, 6),
        max_model_len=rng.choice((MAX_MODEL_LEN, *[min(max(longest, shortest), MAX_MODEL_LEN)] * 3)),
        prefill_chunk=rng.choice((1, 3, 5, 7, 16, 64)),
        spare_rows=rng.choice((0, 0, rng.randrange(40))),
        spare_pages=rng.choice((0, 1) if crowded else (None, 0, 1, 3)),
        admission_headroom=0 if crowded else rng.choice((0, 4, 16)),
        padded=rng.random() < 0.25,
    )


@functools.cache
def original(number: int) -> Submit:
    """The requests that cases choose from and cut: of every kind, with the longest budget. Without `min_tokens` they
    have no stop ids, so that plain decoding says once how each goes on whatever a case stops at.
    """
    rng = random.Random(number)
    submit = random_requests(number, 9, num_draft_tokens=1)[number % 9]
    prompt = submit.prompt_ids if rng.random() < 0.5 else submit.prompt_ids[:12]
    changes: dict[str, Any] = {"max_tokens": MAX_TOKENS, "num_draft_tokens": None}
    if rng.random() < 0.1:
        changes |= {"stop_token_ids": _stop_ids(rng), "min_tokens": rng.randrange(1, 8)}
    elif not submit.params.min_tokens:
        changes["stop_token_ids"] = ()
    if number % 5 == 3:
        changes["bad_words"] = _bad_words(random.Random(f"bad words of {number}"))
    params = msgspec.structs.replace(submit.params, **changes)
    return msgspec.structs.replace(submit, prompt_ids=prompt, params=params)


def _cut(rng: random.Random, submit: Submit, name: str, num_drafts: int, crowded: bool) -> Submit:
    """Most stop or are cut at their budget within a few steps; some want log-probabilities."""
    changes: dict[str, Any] = {
        "max_tokens": rng.randint(MAX_TOKENS // 2, MAX_TOKENS)
        if crowded
        else rng.choice((1, 2, 5, rng.randint(1, MAX_TOKENS))),
        "num_draft_tokens": rng.choice((None, None, 0, rng.randint(0, num_drafts))),
    }
    if not submit.params.min_tokens and rng.random() < (0.2 if crowded else 0.5):
        changes["stop_token_ids"] = _stop_ids(rng)
    if rng.random() < 0.25:
        changes["logprobs"] = rng.choice((0, 3))
    if rng.random() < 0.15:
        changes["prompt_logprobs"] = rng.choice((0, 2))
    return msgspec.structs.replace(submit, request_id=name, params=msgspec.structs.replace(submit.params, **changes))


def _with_method(submit: Submit, method: DraftMethod) -> Submit:
    return msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, draft_method=method))


def _bad_words(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Each id has some that may not follow it, and some that may not follow it and another one."""
    pairs = [(first, last) for first in range(VOCAB_SIZE) for last in rng.sample(range(VOCAB_SIZE), 12)]
    return *pairs, *((rng.randrange(VOCAB_SIZE), *pair) for pair in rng.sample(pairs, 500))


def _stop_ids(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.sample(range(VOCAB_SIZE), rng.choice((5, 20, 60))))


__all__ = ["DEDICATED_TP", "DRAFTERS", "MAX_MODEL_LEN", "Case", "DrafterName", "Limits", "draw_case", "original"]
