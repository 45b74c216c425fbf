"""Parts of `gemray bench`: made-up acceptance, the measuring inbox, floors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gemray_cluster.bench import probes
from gemray_cluster.bench.acceptance import MadeUpAcceptance
from gemray_cluster.bench.floor import floor_of, prefill_floor_of
from gemray_cluster.bench.host_waits import HostWaits
from gemray_cluster.bench.inbox import MeasurementFailed, MeasuringInbox
from gemray_cluster.bench.offline import OfflineRank
from gemray_cluster.bench.peak_memory import PeakMemory
from gemray_cluster.bench.probes import MatrixRates, Probes, ReadRates, read_rates
from gemray_cluster.bench.profile import BUSIEST, CycleProfile, covered
from gemray_cluster.bench.settings import Setup
from gemray_cluster.bench.suites import read_suite
from gemray_cluster.bench.timing import sustained_seconds
from gemray_workers.errors import InvalidField
from gemray_workers.messages import EngineStats, SequenceDelta, SpeculationCounters, StepOutput, Stop, Submit
from gemray_workers.sampling.verify import verify
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant
from support.engine.engine_runner import request

CONFIGS = Path(__file__).resolve().parents[3] / "benchmarks" / "configs"


def rounds(length: float, num_drafts: list[int], count: int) -> list[list[int]]:
    """Accepted counts of each round, after checking what is emitted."""
    accept = MadeUpAcceptance(length)
    found = []
    most = max(num_drafts)
    for _ in range(count):
        drafts_SK = torch.arange(100, 100 + len(num_drafts) * most).view(-1, most)
        chosen_SJ = torch.arange(500, 500 + len(num_drafts) * (most + 1)).view(-1, most + 1)
        verified = accept(drafts_SK, torch.tensor(num_drafts), chosen_SJ)
        for s, n in enumerate(verified.num_accepted_S.tolist()):
            emitted = [*drafts_SK[s, :n].tolist(), int(chosen_SJ[s, n])]
            assert verified.ids_SJ[s].tolist() == emitted + [-1] * (most - n)
        found.append(verified.num_accepted_S.tolist())
    return found


def test_made_up_acceptance_averages_the_length() -> None:
    assert rounds(3.0, [4, 4], 3) == [[2, 2]] * 3
    assert [counts[0] for counts in rounds(2.5, [4], 4)] == [1, 2, 1, 2]
    assert sum(counts[0] for counts in rounds(1.3, [4], 10)) == 3
    assert rounds(1.0, [4], 5) == [[0]] * 5


def test_no_more_is_accepted_than_was_drafted() -> None:
    assert rounds(9.0, [4, 2, 0], 2) == [[4, 2, 0]] * 2


def test_plain_steps_pass_and_count_for_nothing() -> None:
    accept = MadeUpAcceptance(2.5)
    nothing = torch.empty(1, 0, dtype=torch.int64)
    for _ in range(3):
        verified = accept(nothing, torch.tensor([0]), torch.tensor([[7]]))
        assert verified.ids_SJ.tolist() == verify(nothing, torch.tensor([0]), torch.tensor([[7]])).ids_SJ.tolist()
    drafts, chosen = torch.tensor([[1, 2]]), torch.tensor([[7, 8, 9]])
    assert accept(drafts, torch.tensor([2]), chosen).num_accepted_S.item() == 1


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def output(tokens: dict[str, int], draft_s: float = 0.0, verify_s: float = 0.0, fault: str | None = None) -> StepOutput:
    deltas = [SequenceDelta(request_id=name, token_ids=[5] * count, fault=fault) for name, count in tokens.items()]
    stats = EngineStats(
        step=1,
        num_running=0,
        num_waiting=0,
        num_preemptions=0,
        pages_in_use={},
        pages_total={},
        prompt_tokens=0,
        generated_tokens=0,
        last_step_seconds=0.0,
        speculation=SpeculationCounters(),
        draft_seconds=draft_s,
        verify_seconds=verify_s,
    )
    return StepOutput(deltas, stats)


def batch() -> list[Submit]:
    return [request(name, [1, 2], 100) for name in ("a", "b")]


def test_only_steps_of_the_whole_batch_are_timed() -> None:
    clock, seen = Clock(), list[int]()
    inbox = MeasuringInbox(batch(), warm_up_steps=1, steps=2, on_step=seen.append, clock=clock)
    assert inbox.poll(0) == batch()
    script = [
        (1.0, {"a": 1}, 0.0, 1.0),  # b's prompt is not done
        (1.0, {"a": 1, "b": 1}, 0.0, 2.0),  # nor was it before this step
        (0.5, {"a": 2, "b": 2}, 0.1, 2.4),  # warm-up
        (0.25, {"a": 3, "b": 1}, 0.15, 2.6),
        (0.75, {"a": 1, "b": 1}, 0.2, 3.0),
    ]
    for seconds, tokens, draft_s, verify_s in script:
        assert inbox.poll(0) == []
        clock.now += seconds
        inbox.send(output(tokens, draft_s, verify_s))
    assert inbox.poll(0) == [Stop()]
    assert inbox.poll(0) == []
    assert inbox.prefill_seconds == 2.0
    assert [step.seconds for step in inbox.steps] == [0.25, 0.75]
    assert [step.num_tokens for step in inbox.steps] == [4, 2]
    assert [round(step.draft, 6) for step in inbox.steps] == [0.05, 0.05]
    assert [round(step.verify, 6) for step in inbox.steps] == [0.2, 0.4]
    assert seen == [1, 2, 3]


def test_a_batch_that_ends_early_ends_the_measurement() -> None:
    inbox = MeasuringInbox(batch(), steps=50, clock=Clock())
    inbox.poll(0)
    inbox.send(output({"a": 1, "b": 1}))
    last = SequenceDelta(request_id="a", token_ids=[5], finish="length")
    inbox.send(StepOutput([last], output({}).stats))
    assert inbox.poll(0) == [Stop()]
    assert inbox.steps == []


def test_prompts_are_measured_to_the_last_ones_first_token() -> None:
    """Where each asks for one token alone, the first ones end while others' prompts are computed."""
    clock = Clock()
    inbox = MeasuringInbox(batch(), warm_up_steps=4, clock=clock)
    inbox.poll(0)
    for name in ("a", "b"):
        assert inbox.poll(0) == []
        clock.now += 1.5
        inbox.send(StepOutput([SequenceDelta(request_id=name, token_ids=[5], finish="length")], output({}).stats))
    assert inbox.poll(0) == [Stop()]
    assert inbox.prefill_seconds == 3.0


def test_a_fault_is_no_measurement() -> None:
    inbox = MeasuringInbox(batch(), steps=1, clock=Clock())
    inbox.poll(0)
    inbox.require_sound()
    inbox.send(output({"a": 0}, fault="NaN logits"))
    assert inbox.poll(0) == [Stop()], "all ranks are to stop together"
    with pytest.raises(MeasurementFailed, match="request a ended: NaN logits"):
        inbox.require_sound()


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


def test_unknown_settings_of_a_suite_are_refused() -> None:
    with pytest.raises(InvalidField, match=r"stepz.*in a test"):
        Setup.of({"name": "x", "model": "m", "stepz": 3}, "a test")
    with pytest.raises(InvalidField, match="model"):
        Setup.of({"name": "x"}, "a test")


def test_setups_of_a_suite_by_name() -> None:
    suite = CONFIGS.parent / "suites" / "h100-x1.toml"
    named = read_suite(suite, {}, ["E4B-mtp", "31B-none"])
    assert [setup.name for setup in named] == ["31B-none", "E4B-mtp"], "in the suite's order"
    assert len(read_suite(suite, {})) > 5
    with pytest.raises(InvalidField, match="only = '31B' is not allowed: one of 31B-none, 31B-mtp"):
        read_suite(suite, {}, ["31B"])


def test_waits_are_listed_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = list[str]()
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    waits = HostWaits()
    waits.start()
    for _ in range(2):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    prototype = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
    warnings.warn(prototype, stacklevel=1)
    waits.stop()
    assert modes == ["warn", "default"]
    ((place, count),) = waits.places.items()
    assert place.startswith("test_bench_parts.py:")
    assert count == 2


def test_busy_time_counts_overlapping_spans_once() -> None:
    assert covered([(0.0, 1.0), (0.5, 2.0), (0.6, 0.7), (3.0, 4.0)]) == 3.0
    assert covered([]) == 0.0


def test_the_busiest_kernels_by_their_own_time() -> None:
    def event(name: str, start: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    profile = CycleProfile(torch.device("cpu"), first=0, cycles=2)
    assert profile.busiest == {}
    on_card = CycleProfile(torch.device("cpu"), first=0, cycles=2)
    on_card._on_cuda = True
    linear, cast = "linear_kernel", "void at::native::cast<float, int>(float*)"
    times = [event(linear, 0.0, 3000.0), event(cast, 2000.0, 3000.0), event(linear, 4000.0, 5000.0)]
    on_card._device_events = times + [event(f"small {i}", 0.0, 1.0) for i in range(9)]
    busiest = list(on_card.busiest.items())
    assert busiest[:2] == [("linear_kernel", 2.0), ("at::native::cast", 0.5)], "milliseconds of one of two cycles"
    assert len(busiest) == BUSIEST


def test_all_runs_of_a_setup_share_their_graphs() -> None:
    """One rule of made-up acceptance, so one set of captured cycles, made at the start."""
    target = tiny_checkpoint("31B")
    setup = Setup.of(
        {
            "name": "once",
            "model": str(target),
            "drafter": str(tiny_assistant(target)),
            "acceptance_length": 2.5,
            "random_weights": True,
            "device": "cpu",
            "dtype": "float32",
            "batch": [1, 2],
            "sampling": ["greedy", "published"],
            "lag": [1, 0],
            "prompt_len": 5,
            "steps": 2,
            "prefills": 1,
            "kv_memory": 64 << 20,
        },
        "this test",
    )
    rank = OfflineRank(setup, 0, "", Probes())
    engine_rank = rank._worker._engine_rank
    assert engine_rank is not None
    at_start = dict(engine_rank._runners)
    assert [part.row is not None for part in rank.parts(None)] == [False] * 2 + [True] * 8
    assert engine_rank._runners == at_start
    assert len(at_start) == 1
    rank.close()
