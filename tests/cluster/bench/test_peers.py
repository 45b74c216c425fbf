"""Rows beside peers, bars and targets: of one card in milliseconds, of others in multiples of the floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gemray_cluster.bench.missed import MISSED_COLUMNS, dear_sampling, long_gaps, missed_rows
from gemray_cluster.bench.peers import Peer, Peers, read_peers
from gemray_cluster.bench.plot import _label as label
from gemray_cluster.bench.report import Floor, PrefillFloor, PrefillRow, Report, Row, Spread
from gemray_cluster.bench.tables import markdown
from gemray_workers.errors import InvalidField

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def of(ms: float) -> Spread:
    return Spread.of([ms])


def row(
    step_ms: float,
    *,
    device: str = H100,
    model: str = "31B-it",
    floor_ms: float = 20.0,
    target_bytes: int = 60_000_000_000,
    sampling: str = "greedy",
    **changes: Any,
) -> Row:
    return Row(
        name="a setup", model=model, method="none", drafter=None, placement="colocated", tp=1, dtype="bfloat16",
        draft_tokens=0, batch=1, sampling=sampling, lag=1, prompt_len=512, steps=30, acceptance_asked=None,
        acceptance_length=1.0, prefill=of(50.0), step=of(step_ms), draft=of(0.0), verify=of(step_ms - 0.1),
        gap=of(0.02), rest=of(0.1), tokens_per_s=40.0, weight_bytes=1, peak_memory_bytes=1, load_s=1.0,
        choices={}, device=device,
        floor=Floor(target_bytes=target_bytes, drafter_bytes=0, experts_touched=None, bandwidth=1e12, ms=floor_ms),
        **changes,
    )  # fmt: skip


def peers(peer: Peer, model: str = "31B-it") -> Peers:
    return Peers({(model, 1, "none", 0, 1, "greedy"): peer}, {}, "NVIDIA H100", 3e12)


FIGURES = Peer(peer_ms=25.0, floor_ms=20.0, bar_ms=24.0, target_ms=22.0)


@pytest.mark.parametrize(("step_ms", "met"), [(21.9, "target"), (22.1, "bar"), (24.1, "no")])
def test_rows_of_the_peers_card_are_held_against_milliseconds(step_ms: float, met: str) -> None:
    # Its floor is no part of it.
    assert peers(FIGURES).judge(row(step_ms, floor_ms=5.0)).met == met


@pytest.mark.parametrize(("step_ms", "met"), [(15.3, "target"), (15.5, "bar"), (16.9, "no")])
def test_rows_of_another_card_are_held_against_multiples_of_the_floor(step_ms: float, met: str) -> None:
    verdict = peers(FIGURES).judge(row(step_ms, device=H200, floor_ms=14.0))
    assert verdict.met == met
    assert [str(limit) for limit in (*verdict.bars, verdict.target)] == ["1.20 x floor", "1.10 x floor"]


def test_multiples_are_of_the_floor_by_which_bars_are_stated() -> None:
    """A floor of a faster way to read than the peers' would ask for more than was stated."""
    measured = row(16.0, device=H200, floor_ms=13.0)
    by_sum = msgspec.structs.replace(measured.floor, sum_bandwidth=1e12, sum_ms=13.5)
    assert peers(FIGURES).judge(measured).met == "no"
    assert peers(FIGURES).judge(msgspec.structs.replace(measured, floor=by_sum)).met == "bar"


def test_a_multiple_is_of_the_larger_floor() -> None:
    """DFlash's floor counts a head that the peer's does not: with the peer's the multiple would be a larger one."""
    verdict = peers(FIGURES).judge(row(15.0, device=H200, floor_ms=14.0, target_bytes=66_000_000_000))
    assert [limit.value for limit in verdict.bars] == [pytest.approx(24.0 / 22.0)]
    assert verdict.peer_x_floor == pytest.approx(25.0 / 22.0)


def test_without_the_peers_floor_another_card_is_not_judged() -> None:
    known = peers(Peer(peer_ms=25.0, bar_ms=24.0, target_ms=22.0))
    assert known.judge(row(1.0, device=H200)).met is None
    assert known.judge(row(25.0)).met == "no"
    assert peers(FIGURES).judge(row(1.0, sampling="published")).met is None, "other work"


@pytest.mark.parametrize(("device", "step_ms"), [(H200, 6.7), (H100, 7.9)])
def test_a_bar_in_multiples_is_of_every_card_and_asked_for_beside_the_others(device: str, step_ms: float) -> None:
    packed = peers(Peer(floor_ms=6.6, target_ms=8.0, bar_x_floor=1.35))
    measured = row(step_ms, device=device, floor_ms=4.4 if device == H200 else 5.8, target_bytes=19_000_000_000)
    assert packed.judge(measured).met == "no", "a target in milliseconds does not make up for it"
    assert packed.judge(msgspec.structs.replace(measured, step=of(1.35 * measured.floor.ms - 1e-6))).met in (
        "bar",
        "target",
    )


def test_the_repositorys_peers_are_of_an_h100() -> None:
    known = read_peers(BENCHMARKS / "peers.toml")
    assert known is not None
    measured: dict[str, Any] = {"model": "31B-it-w4a16", "sampling": "published", "target_bytes": 19_300_000_000}
    on_h100, on_h200 = (known.judge(row(6.7, device=device, floor_ms=4.4, **measured)) for device in (H100, H200))
    assert [str(bar) for bar in on_h100.bars] == [str(bar) for bar in on_h200.bars] == ["1.35 x floor"]
    assert [str(verdict.target) for verdict in (on_h100, on_h200)] == ["8 ms", "1.21 x floor"]
    assert known.judge(row(23.0)).met == "bar"


def test_a_missed_row_says_where_its_time_goes() -> None:
    missed = row(24.1, busy_ms=23.5, busiest={"linear": 21.25, "attend": 1.5})
    alone = row(24.1)
    (cells,), (plain,) = (list(missed_rows([each, row(21.0)], peers(FIGURES))) for each in (missed, alone))
    assert dict(zip(MISSED_COLUMNS, cells, strict=True)) == {
        "row": "a setup, none, batch 1, greedy, lag 1",
        "missed": "bar 24 ms and target 22 ms",
        "step ms": "24.10",
        "floor": "20.00",
        "kernels beyond it": "3.50",
        "between kernels": "0.50",
        "between cycles": "0.020",
        "else": "0.08",
        "busiest kernels, ms a cycle": "linear 21.25, attend 1.50",
    }
    assert plain[4:6] == ("4.00", "-"), "without a profile gaps between kernels are not told apart"
    assert plain[-1] == "-"


def test_tables_say_what_missed_rows_lack_and_whose_milliseconds_they_show() -> None:
    report = Report(
        date="2026-11-30", devices=[H200], versions={}, settings=[], rows=[row(17.0, device=H200, floor_ms=14.0)]
    )
    text = markdown(report, peers(FIGURES))
    assert "| 25 (1.25) | 1.20 x floor | 1.10 x floor | no |" in text
    assert "of NVIDIA H100, which reads 3 TB/s. Rows of other cards are held against the multiples of the floor" in text
    assert (
        "| a setup, none, batch 1, greedy, lag 1 | bar 1.20 x floor and target 1.10 x floor | 17.00 | 14.00 |" in text
    )
    assert "a setup: 2 GiB were read at up to 1.00 TB/s\n" in text, "as reports from before tell it"
    known = msgspec.structs.replace(report.rows[0].floor, sum_bandwidth=0.96e12, sum_ms=14.6)
    after = [msgspec.structs.replace(report.rows[0], floor=known, read_after=rate) for rate in (0.95e12, 0.9e12)]
    told = markdown(msgspec.structs.replace(report, rows=after), peers(FIGURES))
    assert "up to 1.00 TB/s, 0.96 by one sum over all; right after its rows that sum read 0.90 to 0.95" in told
    assert told.count("| 1.21 | 1.16 |") == 2
    at_home = markdown(msgspec.structs.replace(report, rows=[row(21.0)]), peers(FIGURES))
    assert "| 25 (1.25) | 24 ms | 22 ms | target |" in at_home
    assert "Rows of other cards" not in at_home
    assert "miss bar or target" not in at_home


def test_gaps_and_sampling_are_held_against_what_is_asked_for() -> None:
    greedy, drawn = row(20.0), row(20.6, sampling="published")
    dear = msgspec.structs.replace(drawn, step=of(20.7), batch=1)
    assert list(dear_sampling([greedy, drawn])) == []
    assert list(dear_sampling([dear])) == [], "with no greedy row beside it"
    assert list(dear_sampling([greedy, dear])) == [
        "More than 1.03 times the greedy row: a setup, none, batch 1, published, lag 1: 1.035 times"
    ]
    waits = msgspec.structs.replace(greedy, gap=of(0.11))
    assert list(long_gaps([greedy, msgspec.structs.replace(waits, lag=0)])) == []
    assert list(long_gaps([waits])) == [
        "More than 0.1 ms between two cycles: a setup, none, batch 1, greedy, lag 1: 0.110 ms"
    ]
    report = Report(date="2026-11-30", devices=[H100], versions={}, settings=[], rows=[greedy, dear, waits])
    text = markdown(report, peers(FIGURES))
    assert "\nMore than 0.1 ms" in text
    assert "\nMore than 1.03 times" in text
    assert "More than" not in markdown(report, None)


@pytest.mark.parametrize(("ms", "met"), [(12.9, "bar"), (13.1, "no")])
def test_prompts_are_held_against_multiples_of_their_floor(ms: float, met: str) -> None:
    floor = PrefillFloor(operations=1, matrix_rate=8e14, weight_bytes=1, bandwidth=4e12, ms=10.0)
    prompt = PrefillRow(
        name="a setup", model="31B-it", method="none", tp=1, dtype="bfloat16", num_tokens=512, chunk=512,
        first_token=of(ms), tokens_per_s=1.0, floor=floor, device=H200,
    )  # fmt: skip
    held = Peers({}, {("31B-it", 1): 1.3})
    report = Report(date="2026-11-30", devices=[H200], versions={}, settings=[], prefill=[prompt])
    assert f"| 1.300 | {met} |" in markdown(report, held)
    other = msgspec.structs.replace(report, prefill=[msgspec.structs.replace(prompt, model="E2B-it")])
    assert markdown(other, held).endswith("| - | - |\n")


def test_labels_of_a_picture_tell_rows_apart() -> None:
    exact, apart = row(20.0, numerics="exact"), msgspec.structs.replace(row(20.0), placement="dedicated")
    small_pages = row(20.0, kv_dtype="fp8_e4m3")
    assert len({label(each) for each in (row(20.0), exact, apart, small_pages)}) == 4


def test_tables_tell_what_is_not_served_by_default() -> None:
    assert row(20.0).served == "31B-it"
    assert row(20.0, numerics="exact", kv_dtype="fp8_e4m3").served == "31B-it (exact, fp8_e4m3 KV)"
    report = Report(date="", devices=[H100], versions={}, settings=[], rows=[row(20.0, kv_dtype="fp8_e4m3")])
    assert "| 31B-it (fp8_e4m3 KV) |" in markdown(report, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("device = 3", r"peers.device = 3 is not allowed: a text"),
        ("read_tb_per_s = 0", r"peers.read_tb_per_s = 0 is not allowed: a number > 0"),
        ("read_tb_per_s = true", r"peers.read_tb_per_s = True is not allowed"),
        ('read_tb_per_s = "3"', r"peers.read_tb_per_s = '3' is not allowed"),
    ],
)
def test_a_card_that_is_none_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "peers.toml").write_text(text)
    with pytest.raises(InvalidField, match=words):
        read_peers(tmp_path / "peers.toml")
