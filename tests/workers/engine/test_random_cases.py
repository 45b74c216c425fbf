"""A share of the random cases: every drafter on one rank, and gangs of two to four ranks, at both lags.

Thousands are run by ``python -m support.random_cases``; `benchmarks/results` has a table.
"""

from __future__ import annotations

import pytest

from support.checkpoints.tiny import tiny_checkpoint
from support.processes.gang import RunOnGang
from support.random_cases.case import DRAFTERS, MAX_TOKENS, DrafterName, draw_case
from support.random_cases.sweep import Cell, Tally, cells_for, run_cell
from support.random_cases.verdict import SHORT, free_text


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [drafter for drafter in DRAFTERS if drafter != "dedicated"])
def test_one_rank_gives_what_plain_decoding_gives(run_on_gang: RunOnGang, drafter: DrafterName) -> None:
    tally = Tally()
    run_cell(run_on_gang, Cell(1, drafter), range(11), tally)
    assert not tally.differences
    assert 0 < tally.lag_1 < tally.cases
    assert tally.stopped + tally.cancelled > 0
    assert (tally.accepted > 0) == (drafter != "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "count"),
    [(Cell(2, "mtp-centroids"), 5), (Cell(2, "dflash"), 4), (Cell(4, "mtp"), 3), (Cell(1, "dedicated"), 4)],
    ids=lambda value: f"TP {value.tp}, {value.drafter}" if isinstance(value, Cell) else "",
)
def test_gangs_give_what_plain_decoding_gives(run_on_gang: RunOnGang, cell: Cell, count: int) -> None:
    tally = Tally()
    run_cell(run_on_gang, cell, range(count), tally)
    assert not tally.differences
    assert tally.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "count"),
    [(Cell(1, "both", "fp8_e4m3"), 5), (Cell(2, "dflash", "fp8_e4m3"), 2)],
    ids=lambda value: f"TP {value.tp}, {value.drafter}" if isinstance(value, Cell) else "",
)
def test_an_8_bit_cache_changes_no_id(run_on_gang: RunOnGang, cell: Cell, count: int) -> None:
    """What plain decoding over such a cache gives, a token a step."""
    tally = Tally()
    run_cell(run_on_gang, cell, range(count), tally)
    assert not tally.differences
    assert tally.accepted > 0


def test_a_few_seeds_have_everything() -> None:
    cases = [draw_case(seed, tp=1, drafter="mtp") for seed in range(11)]
    assert any(case.cancels for case in cases)
    assert any(case.ends for case in cases)
    assert {case.lag for case in cases} == {0, 1}
    assert {case.limits.padded for case in cases} == {False, True}
    assert any(submit.params.stop_token_ids for case in cases for submit in case.submits)
    assert any(submit.params.bad_words for case in cases for submit in case.submits)


def test_a_text_that_is_not_decoded_further_is_the_beginning_of_the_longer_one() -> None:
    directory = tiny_checkpoint("31B")
    for number in range(3):
        short, long = (free_text(directory, number, "auto", "fast", length) for length in (SHORT, MAX_TOKENS))
        assert len(short.ids) == min(SHORT, len(long.ids))
        assert (short.ids, short.logprobs) == (long.ids[:SHORT], long.logprobs[:SHORT])
        assert short.prompt_logprobs == long.prompt_logprobs


def test_a_seed_is_a_case_and_a_sweep_has_every_cell() -> None:
    assert draw_case(7, tp=2, drafter="mtp") == draw_case(7, tp=2, drafter="mtp")
    assert draw_case(7, tp=2, drafter="mtp") != draw_case(8, tp=2, drafter="mtp")
    shares = cells_for(3000)
    assert sum(shares.values()) >= 3000
    assert {(cell.tp, cell.drafter) for cell in shares} >= {(4, "dflash"), (2, "dedicated"), (1, "none")}
