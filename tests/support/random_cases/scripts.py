"""What is verified in place of a drafter's own drafts, so that every acceptance occurs with random weights."""

from __future__ import annotations

from support.checkpoints.tiny import VOCAB_SIZE
from support.engine.scripted_drafters import (
    Override,
    Texts,
    always,
    always_right,
    always_wrong,
    in_turn,
    randomly_right,
    right_until,
)


def mixed_script(texts: Texts) -> Override:
    """In two of three rounds right, wrong, partly right, stop ids and the ends of the vocabulary; else the drafter's
    own drafts.
    """
    script = in_turn(
        always_right(texts),
        always_right(texts),
        always_wrong(texts, VOCAB_SIZE),
        right_until(texts, VOCAB_SIZE, 1),
        right_until(texts, VOCAB_SIZE, 3),
        randomly_right(texts, VOCAB_SIZE),
        always(1, 106, 50, 9, 18),
        always(0, VOCAB_SIZE - 1),
    )

    def two_of_three(request_id: str, position: int, count: int) -> list[int] | None:
        return script(request_id, position, count) if position % 3 else None

    return two_of_three
