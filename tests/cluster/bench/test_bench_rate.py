"""`gemray bench` under requests that arrive by themselves: the load, what is counted, an engine, a server."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gemray_cluster.bench.answers import Answer, rate_row
from gemray_cluster.bench.load import Lengths, Load
from gemray_cluster.bench.plot import plot
from gemray_cluster.bench.rate_inbox import RateInbox
from gemray_cluster.bench.report import Percentiles, RateRow, Report
from gemray_cluster.bench.suites import load_of, read_suite, read_toml
from gemray_cluster.bench.tables import markdown
from gemray_cluster.cli.commands import app
from gemray_cluster.text.tokenizer import ChatTokenizer
from gemray_workers.errors import InvalidField
from gemray_workers.messages import SequenceDelta, StepOutput, Stop
from support.cluster.fake_gang import FakeGang, Script
from support.cluster.forked_command import ForkedCommand
from support.cluster.serving import serving
from support.engine.engine_runner import request
from support.waiting import HANG_S

from .test_bench import WITHOUT_RAY, gemray, report_of
from .test_bench_parts import Clock, output

SUITES = Path(__file__).resolve().parents[3] / "benchmarks" / "suites"
TABLE: dict[str, Any] = {
    "rates": [4, 40],
    "seconds": 0.5,
    "warm_up_seconds": 0.2,
    "first_token_limit_ms": 1e6,
    "between_tokens_limit_ms": 1e-6,
    "prompt": [{"tokens": 3, "share": 3}, {"tokens": 9, "share": 1}],
    "output": [{"tokens": 1, "share": 0.5}, {"tokens": 5, "share": 0.5}],
}
SUITE = """
[load]
rates = [4, 40]
seconds = 0.5
warm_up_seconds = 0.2
first_token_limit_ms = 1e6
between_tokens_limit_ms = 1e-6
sampling = "published"
prompt = [{ tokens = 3, share = 3 }, { tokens = 9, share = 1 }]
output = [{ tokens = 1, share = 0.5 }, { tokens = 5, share = 0.5 }]

[[setup]]
name = "tiny"
model = "gemray-tiny"
device = "cpu"
dtype = "float32"
batch = []
max_num_seqs = 4
kv_memory = 67108864
"""


def load(**changes: Any) -> Load:
    return Load.of({**TABLE, **changes}, "a test")


def test_arrivals_are_poisson_and_lengths_as_the_table_says() -> None:
    arrivals = load(seconds=400.0).arrivals(40, 1000)
    assert len(arrivals) == pytest.approx(40 * 400, rel=0.03)
    gaps = [b.at_s - a.at_s for a, b in pairwise(arrivals)]
    assert sum(gap > 1 / 40 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02), "exponential"
    lengths = Counter(len(arrival.prompt_ids) for arrival in arrivals)
    assert lengths.keys() == {3, 9}
    assert lengths[3] / len(arrivals) == pytest.approx(0.75, abs=0.02)
    assert Counter(arrival.num_tokens for arrival in arrivals)[5] / len(arrivals) == pytest.approx(0.5, abs=0.02)


def test_a_load_is_the_same_in_every_run_and_its_warm_up_another() -> None:
    assert load().arrivals(4, 1000) == load().arrivals(4, 1000)
    assert load().arrivals(4, 1000) != load(seed=1).arrivals(4, 1000)
    assert len(load(seconds=1e-6).arrivals(4, 1000)) == 1, "a row has at least one request"
    warm_up = load().warm_up(1000)
    assert [len(arrival.prompt_ids) for arrival in warm_up[:2]] == [3, 9]
    prompts = {tuple(arrival.prompt_ids) for arrival in load().arrivals(40, 1000)}
    assert not prompts & {tuple(arrival.prompt_ids) for arrival in warm_up}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rates": []}, r"load.rates = \(\) is not allowed: numbers > 0"),
        ({"rates": [1, 0]}, r"load.rates"),
        ({"rates": [float("nan")]}, r"load.rates = \[nan\] is not allowed: a finite number, or a list of them"),
        ({"prompt": []}, r"load.prompt = \[\] is not allowed: rows with tokens and share \(in a test\)"),
        ({"prompt": 512}, r"load.prompt = 512 is not allowed: rows with tokens and share \(in a test\)"),
        ({"prompt": [512]}, r"load.prompt = \[512\] is not allowed: rows with tokens and share"),
        ({"prompt": [{"tokens": 1}]}, r"load.prompt.share = None is not allowed: set \(in a test\)"),
        ({"prompt": [{"tokens": 1.5, "share": 1}]}, r"load.prompt.tokens = 1.5 is not allowed: an integer"),
        ({"prompt": [{"tokens": 1, "share": "all"}]}, r"load.prompt.share = 'all' is not allowed: a finite number"),
        ({"output": [{"tokens": 0, "share": 1}]}, "load.output.tokens = 0"),
        ({"output": [{"tokens": 1, "share": 0}]}, "load.output.share"),
        ({"seconds": 0}, "load.seconds = 0"),
        ({"seconds": float("inf")}, "load.seconds = inf is not allowed: a finite number"),
        ({"sampling": "drawn"}, "load.sampling = 'drawn'"),
        ({"rate": 3}, "load.rate = 3 is not allowed: one of rates, "),
    ],
)
def test_a_table_that_says_nothing_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        load(**changes)


def test_a_load_needs_its_limits() -> None:
    with pytest.raises(InvalidField, match=r"load.first_token_limit_ms = None is not allowed: set \(in a test\)"):
        Load.of({name: value for name, value in TABLE.items() if name != "first_token_limit_ms"}, "a test")


def test_a_table_of_rates_says_what_was_asked(tmp_path: Path) -> None:
    answered = [Answer(1.0, [(1.5, 1)])]
    rows = [rate_row("a setup", "engine", load(), rate, answered, method="none", device="cpu") for rate in load().rates]
    text = markdown(Report(date="2026-11-30", devices=["cpu"], versions={}, settings=[], rates=rows), None)
    asked = "| 3 (75%), 9 (25%) | 1 (50%), 5 (50%) | greedy | first token within 1e+06 ms, others within 1e-06 ms each"
    assert text.count(asked) == 1, "one line for both rates"
    before = msgspec.structs.replace(rows[0], prompts={}, outputs={})
    assert "| - | - | greedy |" in markdown(
        Report(date="2026-11-29", devices=["cpu"], versions={}, settings=[], rates=[before]), None
    )


def test_tokens_that_come_at_once_share_their_time() -> None:
    answer = Answer(1.0, [(1.5, 1), (2.5, 4), (3.0, 1)])
    assert answer.first_token_s == 0.5
    assert answer.between_tokens_s == [0.25, 0.25, 0.25, 0.25, 0.5]


def test_a_good_answer_is_within_both_limits() -> None:
    limits = load(first_token_limit_ms=500, between_tokens_limit_ms=300)
    assert Answer(1.0, [(1.5, 1), (2.5, 4), (3.0, 1)]).is_good(limits), "0.3 s a token on average"
    assert not Answer(1.0, [(1.6, 1)]).is_good(limits)
    assert not Answer(1.0, [(1.5, 1), (1.9, 1)]).is_good(limits)
    assert not Answer(1.0, [(1.1, 1)], refusal="RESOURCE_EXHAUSTED: full").is_good(limits)
    assert not Answer(1.0).is_good(limits)


def test_a_row_sums_up() -> None:
    answers = [Answer(0.0, [(0.1, 1), (0.2, 2)]), Answer(0.3, [(0.7, 1)]), Answer(0.4, refusal="full")]
    limits = load(first_token_limit_ms=200, between_tokens_limit_ms=100, seconds=2.0)
    row = rate_row("x", "engine", limits, 4.0, answers, method="none", device="cpu")
    assert (row.requests, row.refused, row.seconds) == (3, 1, 2.0)
    assert row.good_share == pytest.approx(1 / 3)
    assert (row.goodput, row.tokens_per_s) == (0.5, 2.0)
    assert row.first_token is not None
    assert row.first_token.p50 == pytest.approx(250)
    assert row.between_tokens == Percentiles(p50=pytest.approx(50), p99=pytest.approx(50), samples=2)  # type: ignore[arg-type]
    nothing = rate_row("x", "engine", limits, 4.0, answers[2:], method="none", device="cpu")
    assert (nothing.first_token, nothing.between_tokens, nothing.goodput) == (None, None, 0.0)


def test_percentiles() -> None:
    assert Percentiles.of([3.0]) == Percentiles(p50=3.0, p99=3.0, samples=1)
    assert Percentiles.of([float(n) for n in range(101)]) == Percentiles(p50=50.0, p99=99.0, samples=101)


def test_requests_are_handed_over_when_they_arrive() -> None:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    first, second, third = (request(name, [1, 2], 9) for name in "abc")
    inbox = RateInbox([(0.25, first), (1.0, second), (1.0, third)], clock=clock, sleep=sleep)
    assert inbox.poll(0.0) == [], "nothing has arrived, and there is no time to wait"
    assert inbox.poll(0.5) == [first]
    assert clock.now == 10.25, "no longer than the request takes to arrive"
    clock.now += 0.125
    inbox.send(output({"a": 2}))
    assert inbox.poll(0.5) == []
    assert inbox.poll(0.5) == [second, third]
    last = [SequenceDelta(request_id=name, token_ids=[5], finish="length") for name in "abc"]
    inbox.send(StepOutput(last[:2], output({}).stats))
    assert inbox.poll(0.0) == [], "one still runs"
    inbox.send(StepOutput(last[2:], output({}).stats))
    assert inbox.poll(0.0) == [Stop()]
    found = inbox.answers
    assert found["a"].messages == [(0.375, 2), (1.0, 1)]
    assert found["a"].first_token_s == 0.125
    assert found["c"].first_token_s == 0.0


def check_rows(rows: list[RateRow], where: str) -> None:
    assert [(row.where, row.rate) for row in rows] == [(where, 4), (where, 40)]
    for row in rows:
        assert row.refused == 0
        assert row.first_token is not None
        assert row.first_token.samples == row.requests > 0
        assert 0 < row.first_token.p50 <= row.first_token.p99
        assert row.tokens_per_s > 0
        assert row.seconds >= 0.5
        assert (row.first_token_limit_ms, row.between_tokens_limit_ms) == (1e6, 1e-6)
    assert rows[-1].good_share < 1, "no time between tokens is within the limit"


def test_an_engine_under_a_rate(tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text(SUITE)
    done = gemray("bench", "--suite", suite, "--output", tmp_path, command=WITHOUT_RAY)
    assert done.returncode == 0, done.stderr
    report = report_of(tmp_path)
    assert report.rows == []
    check_rows(report.rates, "engine")
    arrivals = read_suite(suite, {})[0].load
    assert arrivals is not None
    assert [row.requests for row in report.rates] == [len(arrivals.arrivals(rate, 2048)) for rate in (4, 40)]
    assert "| engine tiny | none | 4 |" in (tmp_path / "bench.md").read_text()
    assert "requests that arrive at a rate" in done.stdout


async def test_a_server_under_a_rate(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text(SUITE)
    gang = FakeGang(Script([180, 213, 106, 107, 108], group_sizes=(2,)))
    async with serving(tokenizer, gang) as running:
        process = await ForkedCommand.start(
            "bench", "--address", running.server.address, "--suite", str(suite), "--output", str(tmp_path),
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 0, err.decode()
    report = msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=Report)
    check_rows(report.rates, "server")
    measured = sum(row.requests for row in report.rates)
    assert len(gang.submitted) > measured, "others go first"
    assert {submit.params.temperature for submit in gang.submitted} == {1.0}, "the server's own defaults"
    assert all(submit.cache_salt for submit in gang.submitted), "an earlier run would be found in the prefix cache"
    assert "requests/s" in out.decode()


async def test_a_refused_request_is_counted_and_no_error(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    suite = tmp_path / "suite.toml"
    suite.write_text(SUITE.replace("{ tokens = 9, share = 1 }", "{ tokens = 900, share = 1 }"))
    gang = FakeGang(Script([180, 213, 106, 107, 108]))  # of a model that serves 256 tokens
    async with serving(tokenizer, gang) as running:
        process = await ForkedCommand.start(
            "bench", "--address", running.server.address, "--suite", str(suite), "--output", str(tmp_path),
        )  # fmt: skip
        _, err = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 0, err.decode()
    rows = report_of(tmp_path).rates
    assert sum(row.refused for row in rows) > 0
    assert all(row.first_token is None or row.first_token.samples == row.requests - row.refused for row in rows)


def test_a_server_s_suite_has_a_load(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"a file with a \[load\] table"):
        app(["bench", "--address", "127.0.0.1:1", "--suite", str(SUITES / "h100-x1.toml")], standalone_mode=False)
    with pytest.raises(InvalidField, match="unset with --batch"):
        app(["bench", "--address", "127.0.0.1:1", "--suite", "x.toml", "--batch", "1"], standalone_mode=False)


def test_the_published_load() -> None:
    path = SUITES / "rates.toml"
    published = load_of(read_toml("suite", path), path)
    assert published is not None
    assert published.prompt == Lengths((128, 512, 2048), (0.5, 0.35, 0.15))
    for setup in read_suite(path, {}):
        assert setup.load == published
        assert len(setup.work) == len(published.rates)
        config = setup.engine_config()
        assert config.max_model_len is not None
        assert config.max_model_len >= published.longest
        assert (config.capture, config.prefill_chunk, config.max_num_seqs) == ("start", 512, 32)


def test_pictures_of_rates_and_batches(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need the extra `bench`")
    rng = random.Random(1)
    rows = [
        rate_row(
            "x", "engine", load(), rate, [Answer(t / rate, [(t / rate + rng.random(), 1)]) for t in range(9)],
            method="none", device="cpu",
        )
        for rate in (1.0, 2.0)
    ]  # fmt: skip
    assert plot(Report(date="", devices=[], versions={}, settings=[], rates=rows), tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == ["rates.png"]
