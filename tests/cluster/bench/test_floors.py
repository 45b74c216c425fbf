"""Floors of cycles and prompts, and the rates of the memory and the matrix units that they are told by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gemray_cluster.bench import probes
from gemray_cluster.bench.floor import floor_of, prefill_floor_of
from gemray_cluster.bench.peak_memory import PeakMemory
from gemray_cluster.bench.probes import MatrixRates, Probes, ReadRates, read_rates
from gemray_cluster.bench.settings import Setup
from gemray_cluster.bench.timing import sustained_seconds

CONFIGS = Path(__file__).resolve().parents[3] / "benchmarks" / "configs"
PAPER_BANDWIDTH = 3.06e12
PAPER_RATES = ReadRates(PAPER_BANDWIDTH, PAPER_BANDWIDTH)


def setup_of(model: str, drafter: str | None = None, *, batch: int = 1, **changes: object) -> Setup:
    return Setup.of(
        {
            "name": model,
            "model": str(CONFIGS / model),
            "drafter": [] if drafter is None else [str(CONFIGS / drafter)],
            "device": "cpu",
            "batch": batch,
            "random_weights": True,
            **changes,
        },
        "a test",
    )


def floor_ms(model: str, drafter: str | None = None, *, batch: int = 1, **changes: object) -> float:
    setup = setup_of(model, drafter, batch=batch, **changes)
    return floor_of(setup.engine_config(), batch, PAPER_RATES).ms


def test_floors_of_the_published_shapes() -> None:
    """Those of the table in which the peers were measured."""
    assert floor_ms("E2B-it") == pytest.approx(1.49, abs=0.01)
    assert floor_ms("E4B-it") == pytest.approx(3.03, abs=0.01)
    assert floor_ms("26B-A4B-it") == pytest.approx(2.50, abs=0.01)
    assert floor_ms("31B-it") == pytest.approx(20.1, abs=0.05)
    assert floor_ms("31B-it", tp=2) == pytest.approx(10.0, abs=0.05)
    assert floor_ms("31B-it", "31B-it-assistant", draft_tokens=4) == pytest.approx(21.3, abs=0.05)


def test_of_two_drafters_the_one_that_drafts_is_counted() -> None:
    names = ("31B-it-DFlash", "31B-it-assistant")
    both = Setup.of(
        {"name": "both", "model": str(CONFIGS / "31B-it"), "drafter": [str(CONFIGS / name) for name in names],
         "device": "cpu", "random_weights": True}, "a test",
    )  # fmt: skip
    alone = [floor_ms("31B-it", names[1]), floor_ms("31B-it", names[0])]
    config = both.engine_config()
    assert [floor_of(config, 1, PAPER_RATES, drafter=i).ms for i in (0, 1)] == alone, "MTP comes first"
    assert floor_of(config, 1, PAPER_RATES, drafter=None).ms == floor_ms("31B-it")


def prompt_operations(model: str, num_tokens: int, drafter: str | None = None) -> int:
    return prefill_floor_of(
        setup_of(model, drafter).engine_config(),
        num_tokens,
        matrix_rates=MatrixRates(1e15, 8e14),
        bandwidth=PAPER_BANDWIDTH,
    ).operations


def test_a_prompt_meets_the_layers_that_write_keys() -> None:
    """12 sliding and 2 full layers of E2B, the next one's keys; all that its last token meets once."""
    ends = 1536 * 3 * 6144 + 2 * 1536 * 256
    sliding, full = 1536 * (2048 + 512 + 2048) + ends, 1536 * (4096 + 1024 + 4096) + ends
    a_token = 2 * (12 * sliding + 2 * full + 1536 * 5120 + 1536 * 35 * 256)
    one, many = prompt_operations("E2B-it", 1), prompt_operations("E2B-it", 1001)
    assert (many - one) / 1000 == pytest.approx(a_token, rel=1e-3)
    assert one > 3 * a_token
    # A captured layer is one for all tokens.
    captured = prompt_operations("31B-it", 2, "31B-it-DFlash") - prompt_operations("31B-it", 1, "31B-it-DFlash")
    assert captured >= prompt_operations("31B-it", 2) - prompt_operations("31B-it", 1)


def test_a_block_drafter_reads_the_targets_head_again() -> None:
    head = 1000 * 262144 * 5376 * 2 / PAPER_BANDWIDTH
    both = floor_ms("31B-it", "31B-it-DFlash")
    assert both - head == pytest.approx(21.1, abs=0.05)
    assert floor_ms("31B-it", "31B-it-DFlash", drafter_placement="dedicated") == pytest.approx(both)


def test_more_rows_touch_more_experts() -> None:
    floors = [floor_ms("26B-A4B-it", batch=batch) for batch in (1, 8, 32, 1000)]
    assert floors == sorted(floors)
    assert floors[-1] == pytest.approx(1000 * 25.23e9 * 2 / PAPER_BANDWIDTH, rel=0.01)


def test_a_small_assistant_reads_few_rows_of_its_table() -> None:
    one = floor_ms("E4B-it", "E4B-it-assistant", draft_tokens=4) - floor_ms("E4B-it")
    assert 0 < one < 4 * 1000 * 78.8e6 * 2 / PAPER_BANDWIDTH / 5


def test_read_rates_are_those_of_a_memory() -> None:
    rates = read_rates(torch.device("cpu"))
    assert 1e8 < rates.sum <= rates.best < 1e13


def test_a_floor_is_of_the_device_at_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    seen = {first: iter([(3.0, 2.0), (2.0, 1.0), (4.0, 3.5)]), second: iter([(1.0, 0.5)])}
    monkeypatch.setattr(probes, "read_rates", lambda device: ReadRates(*next(seen[device])))
    best = Probes()
    found = [best.read_rates(device) for device in (first, first, second, first)]
    assert found == [ReadRates(3.0, 2.0), ReadRates(3.0, 2.0), ReadRates(1.0, 0.5), ReadRates(4.0, 3.5)]
    assert best.best_read(second) == ReadRates(1.0, 0.5)


def test_what_is_read_after_steps_counts_for_their_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, sums = torch.device("cpu"), iter([2.5, 5.0])
    monkeypatch.setattr(probes, "read_rates", lambda _device: ReadRates(4.0, 3.0))
    monkeypatch.setattr(probes, "sum_rate", lambda _x_N: next(sums))
    best = Probes()
    best.read_rates(cpu)
    assert [(best.sum_now(cpu), best.best_read(cpu)) for _ in range(2)] == [
        (2.5, ReadRates(4.0, 3.0)),
        (5.0, ReadRates(5.0, 5.0)),
    ], "no floor is of a slower rate than any that was seen"


def test_reading_is_measured_until_freed_memory_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver clears for a third of a second, say, and a median of that time would be of a slower memory."""
    now = [0.0]

    def median_seconds(_read: Callable[[], object], _device: torch.device) -> float:
        now[0] += 0.02
        return 2.0 if now[0] < 0.33 else 1.0

    monkeypatch.setattr(probes, "median_seconds", median_seconds)
    monkeypatch.setitem(probes.CLEARED_S, "cpu", probes.CLEARED_S["cuda"])
    rates = read_rates(torch.device("cpu"), clock=lambda: now[0])
    assert rates.sum == probes.BYTES["cpu"]


def test_the_fastest_way_to_read_is_the_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([4.0, 3.0, 2.0, 5.0])
    monkeypatch.setattr(probes, "median_seconds", lambda _read, _device: next(seconds))
    rates = read_rates(torch.device("cpu"))
    assert (rates.best, rates.sum) == (probes.BYTES["cpu"] / 2, probes.BYTES["cpu"] / 4)
    floor = floor_of(setup_of("E2B-it").engine_config(), 1, ReadRates(4e12, 3.06e12))
    assert floor.ms == pytest.approx(floor.target_bytes / 4e9)
    assert floor.sum_ms == pytest.approx(1.49, abs=0.01), "that by which the peer's is stated"
    assert floor.stated_ms == floor.sum_ms


def test_what_probes_take_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    card, peak = torch.device("cuda", 0), [0]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: peak.__setitem__(0, 0))
    memory = PeakMemory(card)
    peak[0] = 5
    with memory.aside():
        peak[0] = 9
    assert memory.bytes == 5
    peak[0] = 7
    assert memory.bytes == 7
    assert PeakMemory(torch.device("cpu")).bytes == 0


def test_a_second_of_products_is_measured_once_and_bursts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bursts, seconds = iter([8.0, 7.0, 9.0]), iter([6.0])
    monkeypatch.setattr(probes, "product_rate", lambda *_: next(bursts))
    monkeypatch.setattr(probes, "sustained_product_rate", lambda *_: next(seconds))
    best, cpu = Probes(), torch.device("cpu")
    found = [best.matrix_rates(cpu, torch.float32) for _ in range(3)]
    assert found == [MatrixRates(8.0, 6.0), MatrixRates(8.0, 6.0), MatrixRates(9.0, 6.0)]


def test_a_sustained_rate_is_of_as_many_runs_as_fill_the_time() -> None:
    ran = list[int]()
    seconds = sustained_seconds(lambda: ran.append(1), torch.device("cpu"), burst_s=0.01, lasting_s=1.0)
    assert len(ran) == 20 + 100
    assert seconds > 0


def test_a_prompt_has_a_floor_at_either_rate() -> None:
    config = setup_of("31B-it").engine_config()
    long, short = (
        prefill_floor_of(config, n, matrix_rates=MatrixRates(8e14, 6e14), bandwidth=PAPER_BANDWIDTH) for n in (2048, 8)
    )
    assert long.sustained_ms == pytest.approx(long.ms * 8 / 6)
    assert short.sustained_ms == short.ms == pytest.approx(1000 * short.weight_bytes / PAPER_BANDWIDTH)
