"""Rows of a step: enough for what runs at one time, known before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemray_workers.errors import InvalidField
from gemray_workers.rank.blueprint import Blueprint
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config

TARGET = tiny_checkpoint("31B")
DFLASH_16 = tiny_dflash(TARGET, block_size=16)
SERVED = {"max_step_tokens": None, "prefill_chunk": 256, "max_num_seqs": 32}
"""As `gemray serve` has it by default."""


def rows(drafter: Path | None, **settings: Any) -> int:
    config = engine_config(TARGET, drafter_path=None if drafter is None else str(drafter), **{**SERVED, **settings})
    return Blueprint.of(config).scheduler.max_step_tokens


@pytest.mark.parametrize(
    ("drafter", "settings", "expected"),
    [
        (None, {}, 512),
        (None, {"max_num_seqs": 600}, 600 + 256),
        (tiny_assistant(TARGET), {}, 512),
        (tiny_assistant(TARGET), {"num_draft_tokens": 16}, 32 * 17 + 256),
        (DFLASH_16, {"max_num_seqs": 64}, 64 * 16 + 256),
        (DFLASH_16, {"max_num_seqs": 64, "num_draft_tokens": 0}, 512),
        (DFLASH_16, {"max_num_seqs": 64, "method": "none"}, 512),
        (DFLASH_16, {"max_num_seqs": 64, "max_step_tokens": 1024}, 1024),
    ],
)
def test_they_follow_from_sequences_and_drafts(drafter: Path | None, settings: Any, expected: int) -> None:
    assert rows(drafter, **settings) == expected


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"max_num_seqs": 64, "max_step_tokens": 512}, 64 * 16),
        ({"max_step_tokens": 511}, 32 * 16),
        ({"max_step_tokens": 31, "method": "none"}, 32),
    ],
)
def test_too_few_are_refused_before_loading(settings: Any, least: int) -> None:
    with pytest.raises(InvalidField, match=rf"max_step_tokens = {settings['max_step_tokens']} .*: >= {least},"):
        rows(DFLASH_16, **settings)
