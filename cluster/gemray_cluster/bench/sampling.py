"""How rows choose their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

SamplingName = Literal["greedy", "published"]

SAMPLING: Mapping[SamplingName, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "published": {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "min_p": 0.0, "suppress_tokens": (258882, 258883)},
}
"""Parameters by name. ``published`` is what the checkpoints' generation_config says; the ids that it forbids are those
that begin images and audio."""
