"""How long the lists of a request may be, as the protocol states it: told before any entry is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from gemray.openai.errors import HttpError

MOST_ENTRIES: Mapping[str, int] = {
    "messages": 8192,
    "tool_calls": 128,
    "tools": 1024,
    "stop": 16,
    "stop_token_ids": 256,
    "bad_words": 256,
    "choice": 4096,
    "allowed_token_ids": 262_144,
    "logit_bias": 262_144,
}
"""By field; the two of a vocabulary's size by the largest one of Gemma 4."""
MOST_PROMPT_IDS = 1 << 20
"""More than any Gemma 4 takes; how many the served one takes is the server's to say."""


def check_length(name: str, param: str, entries: Sized) -> None:
    """Raise HttpError for more entries than the field `name` may have, which the request knows as `param`."""
    most = MOST_ENTRIES.get(name)
    if most is not None and len(entries) > most:
        raise HttpError(400, f"{param} has {len(entries)} entries, at most {most} are allowed", param=param)


def check_prompt_ids(param: str, ids: Sized) -> None:
    """Raise HttpError for more token ids than a prompt could have."""
    if len(ids) > MOST_PROMPT_IDS:
        message = f"{param} has {len(ids)} tokens, at most {MOST_PROMPT_IDS} are allowed"
        raise HttpError(400, message, param=param, code="context_length_exceeded")
