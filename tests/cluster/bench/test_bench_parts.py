"""Parts of `gemray bench`: made-up acceptance, the measuring inbox, suites, waits and profiles."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gemray_cluster.bench.acceptance import MadeUpAcceptance
from gemray_cluster.bench.host_waits import HostWaits
from gemray_cluster.bench.inbox import MeasurementFailed, MeasuringInbox
from gemray_cluster.bench.offline import OfflineRank
from gemray_cluster.bench.probes import Probes
from gemray_cluster.bench.profile import BUSIEST, CycleProfile, covered
from gemray_cluster.bench.settings import Setup
from gemray_cluster.bench.suites import read_suite
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
