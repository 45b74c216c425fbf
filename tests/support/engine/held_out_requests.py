"""Requests for the embedded family: prompts that were kept out of its training, so that acceptance is a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemray_workers.messages import Submit
from support.engine.engine_runner import request

_PROMPTS = Path(__file__).resolve().parents[3] / "benchmarks" / "embedded_family" / "held_out_prompts.json"


def held_out_prompts(count: int) -> list[dict[str, Any]]:
    """`count` prompts (kind, form, ids) of every kind, spread over the whole list."""
    prompts: list[dict[str, Any]] = json.loads(_PROMPTS.read_text())
    return prompts[:: len(prompts) // count][:count]


def held_out_requests(count: int, max_tokens: int, *, longest_prompt: int = 256, **params: Any) -> list[Submit]:
    """A request for each of `held_out_prompts`; greedy unless `params` say otherwise."""
    return [
        request(f"{i} {p['kind']}/{p['form']}", p["ids"][-longest_prompt:], max_tokens, **params)
        for i, p in enumerate(held_out_prompts(count))
    ]
