"""What all parts of one answer say alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Head:
    """An answer's identity."""

    answer_id: str
    created: int
    """Seconds since 1970."""
    model: str
    fingerprint: str

    def body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A body, or a chunk, of the kind that OpenAI's `object` names."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }
