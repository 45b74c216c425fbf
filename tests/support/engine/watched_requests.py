"""Requests and scripts for tests that watch a drafter round by round."""

from __future__ import annotations

import functools

import torch

from gemray_workers.messages import Submit
from support.checkpoints.tiny import VOCAB_SIZE, Shape, tiny_checkpoint
from support.engine.engine_runner import request
from support.engine.scripted_drafters import (
    Script,
    Texts,
    always_right,
    in_turn,
    plain_texts,
    randomly_right,
    right_until,
)
from support.engine.speculation_rig import solo_rig


def greedy_requests(lengths: tuple[int, ...], num_drafts: tuple[int, ...], max_tokens: int = 30) -> list[Submit]:
    """One request a prompt length, each with its own number of drafts a step."""
    generator = torch.Generator().manual_seed(7)
    return [
        request(
            f"r{i}",
            torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist(),
            max_tokens,
            num_draft_tokens=drafts,
        )
        for i, (length, drafts) in enumerate(zip(lengths, num_drafts, strict=True))
    ]


@functools.cache
def plain_greedy_texts(
    shape: Shape, lengths: tuple[int, ...], num_drafts: tuple[int, ...], max_tokens: int = 30
) -> Texts:
    """What an engine without a drafter makes of them."""
    submits = greedy_requests(lengths, num_drafts, max_tokens)
    return plain_texts(submits, solo_rig(tiny_checkpoint(shape)).run(submits).ids)


def every_acceptance(texts: Texts) -> Script:
    """Rounds of all kinds, one after the other: wholly right, right at first, right here and there."""
    return in_turn(
        always_right(texts),
        right_until(texts, VOCAB_SIZE, 0),
        right_until(texts, VOCAB_SIZE, 1),
        right_until(texts, VOCAB_SIZE, 3),
        randomly_right(texts, VOCAB_SIZE),
    )
