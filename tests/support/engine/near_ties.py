"""Where two runs of the same requests part, and how near the two tokens were there.

Sums in another order round differently in bfloat16. Where the two largest logits are nearer than that, the runs may
choose differently, and from there on they are different texts: only the first difference of a request tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemray_workers.sampling.token_logprob import TokenLogprob
from support.engine.engine_runner import Run


@dataclass(frozen=True)
class Parting:
    """The first token at which a request's two texts differ."""

    request_id: str
    position: int
    """Tokens before it."""
    gap: float
    """Nats between the first run's log-probabilities of the two tokens; infinite if the second run's token was not
    among the first run's largest."""


def partings(first: Run, second: Run) -> list[Parting]:
    """Where requests' ids begin to differ. The first run must have log-probabilities with a few top tokens."""
    found = []
    for request_id, result in first.results.items():
        mine, other = result.ids, second.results[request_id].ids
        position = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
        if position is not None:
            logprobs = [entry for delta in result.deltas for entry in delta.logprobs or []]
            found.append(Parting(request_id, position, _gap(logprobs, position, other[position])))
    return found


def _gap(logprobs: Sequence[TokenLogprob], position: int, other: int) -> float:
    entry = logprobs[position]
    top: Mapping[int, float] = dict(entry.top)
    return entry.logprob - top.get(other, float("-inf"))


def told(name: str, first: Run, second: Run) -> str:
    """One line on how two runs compare."""
    apart = partings(first, second)
    agreed = sum(next((p.position for p in apart if p.request_id == r), len(first.ids[r])) for r in first.ids)
    total = sum(len(ids) for ids in first.ids.values())
    gaps = ", ".join(f"{p.request_id}@{p.position}: {p.gap:.4f}" for p in apart)
    return f"{name}: {agreed} of {total} tokens before the first difference; gaps there in nats: {gaps or 'none'}"
