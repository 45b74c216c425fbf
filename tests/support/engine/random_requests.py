"""Random requests of every kind, and the situations of an engine in which their ids must not change."""

from __future__ import annotations

import random
from typing import Any

from gemray_workers.kv.block_table import most_pages
from gemray_workers.messages import Submit
from support.checkpoints.tiny import VOCAB_SIZE, WINDOW
from support.engine.engine_runner import request
from support.engine.speculation_rig import Rig

MAX_MODEL_LEN = 72

SAMPLERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.02},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"presence_penalty": 0.7, "logit_bias": {17: 2.0, 3: -50.0}, "suppress_tokens": (5, 9)},
    {"temperature": 1.1, "top_k": 30, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 9)), "min_tokens": 5},
    {"temperature": 0.8, "allowed_token_ids": tuple(range(1, VOCAB_SIZE, 5)), "stop_token_ids": (1, 106, 50)},
)
"""Those of the engine's own tests, and one with an allow-list."""

# Around the window, its double, and the context limit.
_PROMPT_LENGTHS = (
    1,
    2,
    WINDOW - 1,
    WINDOW,
    WINDOW + 1,
    2 * WINDOW - 1,
    2 * WINDOW,
    2 * WINDOW + 3,
    40,
    MAX_MODEL_LEN - 9,
)


def random_requests(seed: int, count: int, *, num_draft_tokens: int, max_tokens: int = 28) -> list[Submit]:
    """Requests that differ in everything: length, sampler, seed, budget, and drafts a step (0 and unset among them)."""
    rng = random.Random(seed)
    submits = []
    for i in range(count):
        length = rng.choice((*_PROMPT_LENGTHS, rng.randrange(1, MAX_MODEL_LEN - 1)))
        params = {
            **SAMPLERS[i % len(SAMPLERS)],
            "seed": rng.getrandbits(64),
            "num_draft_tokens": rng.choice((None, None, 0, rng.randrange(1, num_draft_tokens + 1))),
        }
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        submits.append(request(f"{seed}.{i}", prompt, rng.randrange(1, max_tokens), **params))
    return submits


def short_chunks(seed: int, rig: Rig) -> dict[str, Any]:
    """Limits of `Rig.run`: prompts in small pieces, few sequences at a time."""
    rng = random.Random(seed)
    return {
        "prefill_chunk": rng.choice((1, 3, 5, 7, 16)),
        "num_slots": rng.choice((3, 6, 8)),
        "max_model_len": MAX_MODEL_LEN,
    }


def scarce_pages(seed: int, rig: Rig) -> dict[str, Any]:
    """Limits of `Rig.run`: pages for little more than one sequence of full length, so that some are preempted."""
    chunk = 16
    rows = 2 * max(chunk, 1 + rig.num_draft_tokens)  # those of a step and of the one that may be in flight
    return {
        "prefill_chunk": chunk,
        "num_slots": 8,
        "max_model_len": MAX_MODEL_LEN,
        "admission_headroom": 0,
        "num_pages": {
            spec.name: most_pages(MAX_MODEL_LEN, spec.page_size, spec.window, rows) * 5 // 4 for spec in rig.specs
        },
    }
