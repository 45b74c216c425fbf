"""A share of the random chats: ids with the prefix cache are ids without it.

Hundreds are run by ``python -m support.multi_turn``; `benchmarks/results` has a table.
"""

from __future__ import annotations

import pytest

from support.multi_turn.case import DRAFTERS, DrafterName, draw_case
from support.multi_turn.sweep import run_seeds


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chats_get_the_same_with_the_cache_and_without(drafter: DrafterName) -> None:
    tally = run_seeds(drafter, range(4))
    assert not tally.differences
    assert 0 < tally.cached < tally.prompt_tokens


def test_a_seed_is_a_case_and_a_few_have_everything() -> None:
    assert draw_case(7, "mtp") == draw_case(7, "mtp") != draw_case(8, "mtp")
    cases = [draw_case(seed, "mtp") for seed in range(12)]
    assert {case.lag for case in cases} == {0, 1}
    assert {case.collide for case in cases} == {False, True}
    assert any(turn.cancel_after is not None for case in cases for chat in case.chats for turn in chat.turns)
    assert any(case.spare_pages == 0 for case in cases)
