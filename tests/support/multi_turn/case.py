"""One random case: a target, a drafter, limits, and chats whose turns begin with all that was said before."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from gemray_workers.kv.block_table import most_pages
from gemray_workers.messages import Submit
from support.checkpoints.tiny import SHAPES, VOCAB_SIZE, WINDOW, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import request
from support.engine.speculation_rig import PAGE_SIZE, Rig

DrafterName = Literal["none", "mtp", "dflash"]
DRAFTERS: tuple[DrafterName, ...] = ("none", "mtp", "dflash")
MAX_MODEL_LEN = 160
NUM_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Turn:
    """What a user says, and what is asked for with it."""

    said: tuple[int, ...]
    params: Mapping[str, Any]
    cancel_after: int | None
    """Tokens after which the client goes away; the chat ends by that."""


@dataclass(frozen=True)
class Chat:
    """One conversation."""

    name: str
    system: tuple[int, ...]
    """What it begins with; several chats may share it."""
    turns: tuple[Turn, ...]
    salt: str

    def submit(self, turn: int, text: Sequence[int]) -> Submit:
        """The request of a turn behind all that was said before."""
        params = dict(self.turns[turn].params)
        submit = request(f"{self.name}.{turn}", [*text, *self.turns[turn].said], params.pop("max_tokens"), **params)
        return msgspec.structs.replace(submit, cache_salt=self.salt)


@dataclass(frozen=True)
class Case:
    """All that is served, drawn from one seed."""

    seed: int
    shape: Shape
    drafter: DrafterName
    chats: tuple[Chat, ...]
    num_slots: int
    prefill_chunk: int
    spare_pages: int | None
    """Pages of each KV group beyond one sequence of full length; None is plenty."""
    admission_headroom: int
    lag: int
    collide: bool
    """Every hash is equal."""

    @property
    def directory(self) -> Path:
        """The target's checkpoint."""
        return tiny_checkpoint(self.shape)

    @property
    def drafter_path(self) -> Path | None:
        """The drafter's."""
        match self.drafter:
            case "none":
                return None
            case "mtp":
                return tiny_assistant(self.directory)
            case "dflash":
                return tiny_dflash(self.directory, block_size=NUM_DRAFT_TOKENS + 1)

    def limits(self, rig: Rig) -> dict[str, Any]:
        """Keyword arguments of `Rig.engine`."""
        limits: dict[str, Any] = {
            "num_slots": self.num_slots,
            "prefill_chunk": self.prefill_chunk,
            "max_model_len": MAX_MODEL_LEN,
            "admission_headroom": self.admission_headroom,
            "lag": self.lag,
        }
        if self.spare_pages is not None:
            rows = 2 * max(self.prefill_chunk, 1 + NUM_DRAFT_TOKENS)
            limits["num_pages"] = {
                spec.name: most_pages(MAX_MODEL_LEN, PAGE_SIZE, spec.window, rows) + self.spare_pages
                for spec in rig.specs
            }
        return limits


def draw_case(seed: int, drafter: DrafterName) -> Case:
    """The case of a seed."""
    rng = random.Random(f"{seed}/{drafter}")
    systems = [_ids(rng, rng.choice((0, 3, PAGE_SIZE, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 24, 41))) for _ in range(2)]
    return Case(
        seed=seed,
        shape=rng.choice(SHAPES),
        drafter=drafter,
        chats=tuple(_chat(rng, str(i), rng.choice(systems)) for i in range(rng.randint(1, 5))),
        num_slots=rng.randint(1, 4),
        prefill_chunk=rng.choice((1, 3, 5, 8, 16, 64)),
        spare_pages=rng.choice((None, 0, 1, 4, 12)),
        admission_headroom=rng.choice((0, 0, 4, 16)),
        lag=rng.randrange(2),
        collide=rng.random() < 0.2,
    )


def _chat(rng: random.Random, name: str, system: tuple[int, ...]) -> Chat:
    turns = tuple(_turn(rng) for _ in range(rng.randint(1, 3)))
    return Chat(name, system, turns, salt=rng.choice(("", "", "", "tenant")))


def _turn(rng: random.Random) -> Turn:
    params: dict[str, Any] = {
        "max_tokens": rng.choice((1, 2, 5, 9, 13)),
        "num_draft_tokens": rng.choice((None, None, 0)),
    }
    if rng.random() < 0.5:
        params |= {
            "temperature": rng.choice((0.5, 1.0, 2.0)),
            "top_k": rng.choice((0, 5)),
            "seed": rng.randrange(1 << 32),
        }
    if rng.random() < 0.3:
        params["stop_token_ids"] = tuple(rng.sample(range(VOCAB_SIZE), 20))
    if rng.random() < 0.15:
        params["prompt_logprobs"] = 0
    if rng.random() < 0.1:
        params |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    return Turn(_ids(rng, rng.choice((1, 2, 4, 7, 12))), params, rng.randrange(5) if rng.random() < 0.1 else None)


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(count))
