"""Where a sequence ends inside the tokens of one step: the earliest event wins and nothing follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gemray_workers.grammar.run import GrammarRun
from gemray_workers.sampling.params import SamplingParams


@dataclass(frozen=True)
class TrimmedTokens:
    """How many of the new tokens stay, and why the sequence ends there, if it does."""

    num_kept: int
    finish: Literal["stop_token", "grammar", "length"] | None = None
    matched_stop_id: int | None = None


def trim(
    token_ids: Sequence[int],
    *,
    num_generated: int,
    num_tokens: int,
    params: SamplingParams,
    max_model_len: int,
) -> TrimmedTokens:
    """Find the first of: a stop id once `min_tokens` were generated, the `max_tokens`-th generated token, the
    `max_model_len`-th token. A stop id that uses up the budget is a stop. The token that ends the sequence stays.

    Args:
        token_ids: this step's new tokens: accepted drafts and one more.
        num_generated: tokens generated before them.
        num_tokens: tokens of the sequence before them, prompt included.
    """
    room = min(params.max_tokens - num_generated, max_model_len - num_tokens)
    for index, token_id in enumerate(token_ids[: max(room, 0)]):
        if token_id in params.stop_token_ids and num_generated + index >= params.min_tokens:
            return TrimmedTokens(index + 1, "stop_token", token_id)
    if len(token_ids) >= room:
        return TrimmedTokens(max(room, 0), "length")
    return TrimmedTokens(len(token_ids))


def complete(trimmed: TrimmedTokens, token_ids: Sequence[int], grammar: GrammarRun) -> TrimmedTokens:
    """Let the grammar take what `trim` left: the text ends where nothing can follow, if that comes first. With the last
    token of the budget it is complete and not cut."""
    is_stop = trimmed.finish == "stop_token"
    num_taken = grammar.take(token_ids[: trimmed.num_kept - is_stop])
    return trimmed if num_taken is None else TrimmedTokens(num_taken, "grammar")
