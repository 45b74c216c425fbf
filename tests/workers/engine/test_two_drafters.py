"""An MTP and a DFlash drafter in one engine: ids are those of plain decoding, whoever drafts for whom and when.

Methods are mixed within batches by what requests ask for, and within a request by `switching_drafters`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from gemray_workers.drafters.pair import DrafterPair
from gemray_workers.embedded import embedded_path
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.execution.cycle_rows import CyclePlan, CycleRows
from gemray_workers.execution.slots import SlotTable
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.rank.target_rank import EngineRank
from gemray_workers.rank.warm_up import OneByOne
from gemray_workers.sampling.state import SamplingState
from gemray_workers.scheduling.plan import ScheduledRows
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config, request, serve
from support.engine.held_out_requests import held_out_requests
from support.engine.random_requests import MAX_MODEL_LEN, random_requests, scarce_pages, short_chunks
from support.engine.scripted_drafters import Override, ScriptedDrafter, plain_texts
from support.engine.speculation_rig import Rig, solo_rig
from support.engine.step_times import erratic, steady, step_times
from support.engine.switching import switching_drafters
from support.oracles.oracle import load_model
from support.processes.gang import RunOnGang
from support.random_cases.scripts import mixed_script

BLOCK_SIZE = 8
METHODS = ("auto", "mtp", "dflash", "auto", "none")
SHAPES: tuple[Shape, ...] = ("E4B", "31B", "26B-A4B")


def pair_rig(directory: Path) -> Rig:
    """MTP drafts 4 tokens, DFlash 7; the order of the two paths means nothing."""
    return solo_rig(
        directory,
        drafter_path=tiny_dflash(directory, block_size=BLOCK_SIZE),
        second_drafter_path=tiny_assistant(directory),
    )


def trained_pair_rig() -> Rig:
    return solo_rig(
        embedded_path("gemray-tiny"),
        drafter_path=embedded_path("gemray-tiny-assistant"),
        second_drafter_path=embedded_path("gemray-tiny-dflash"),
    )


def mixed_requests(seed: int, count: int = 10) -> list[Submit]:
    submits = random_requests(seed, count, num_draft_tokens=7)
    return [
        msgspec.structs.replace(s, params=msgspec.structs.replace(s.params, draft_method=METHODS[i % len(METHODS)]))
        for i, s in enumerate(submits)
    ]


class WatchedPair(ScriptedDrafter):
    """Notes who was asked to draft, and puts a script's drafts in the place of most."""

    def __init__(self, rig: Rig, script: Override) -> None:
        super().__init__(script, rig.drafter)
        self.together: set[frozenset[int]] = set()
        """Drafters of each cycle."""
        self.whose: dict[tuple[str, int], int] = {}
        """By request and start of a round."""

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        self.together.add(frozenset(r.drafter for r in rows.plan.scheduled if r.num_drafts))
        for r, start in zip(rows.plan.scheduled, rows.start_A.tolist(), strict=False):
            self.whose[slots[r.slot].request_id, start] = r.drafter
        super().propose(rows, slots)


def own_drafts(_request_id: str, _position: int, _count: int) -> list[int] | None:
    """A script that leaves all drafts as they are."""
    return None


@functools.cache
def plain_ids(directory: Path, seed: int) -> dict[str, list[int]]:
    return solo_rig(directory).run(mixed_requests(seed), max_model_len=MAX_MODEL_LEN).ids


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_do_not_depend_on_who_drafts(shape: Shape) -> None:
    directory = tiny_checkpoint(shape)
    rig = pair_rig(directory)
    assert rig.draft_tokens == {"mtp": 4, "dflash": 7}
    situations = ((0, short_chunks, False), (1, scarce_pages, False), (1, short_chunks, True))
    for i, (lag, situation, padded) in enumerate(situations):
        seed = SHAPES.index(shape)
        prefix_cache = (seed + i) % 2 == 0
        expected, submits = plain_ids(directory, seed), mixed_requests(seed)
        pair = WatchedPair(rig, mixed_script(plain_texts(submits, expected)))
        with switching_drafters(rig.draft_tokens):
            limits = {**situation(seed, rig), "num_slots": 6}
            run = rig.run(submits, drafter=pair, lag=lag, prefix_cache=prefix_cache, padded=padded, **limits)
        assert run.ids == expected
        assert pair.together >= {frozenset({0}), frozenset({1}), frozenset({0, 1})}
        assert run.speculation.accepted > 0
        assert all(part.accepted > 0 for part in run.speculation.of_drafters)
        assert len(run.speculation.of_drafters) == 2
        assert (run.preemptions > 0) == (situation is scarce_pages)


def test_each_drafter_knows_what_it_would_know_alone() -> None:
    """Drafts follow from the text before them: a drafter that takes over in the middle makes those that it makes when
    it drafts from the beginning. In trained drafters a wrong context would show.
    """
    rig = trained_pair_rig()

    def watch(method: str) -> WatchedPair:
        submits = held_out_requests(5, 40, draft_method=method)
        watched = WatchedPair(rig, own_drafts)
        with switching_drafters(rig.draft_tokens or {}):
            rig.run(submits, drafter=watched, max_step_tokens=512, num_slots=4)
        return watched

    alone = [{(r.request_id, r.start): r.drafts for r in watch(method).rounds} for method in ("mtp", "dflash")]
    both, compared = watch("auto"), [0, 0]
    for r in both.rounds:
        drafter = both.whose[r.request_id, r.start]
        drafts = alone[drafter].get((r.request_id, r.start), [])
        if len(drafts) == len(r.drafts):  # a block of another length is another question
            assert r.drafts == drafts
            compared[drafter] += 1
    assert min(compared) > 5, compared


@pytest.mark.parametrize("lag", [0, 1])
def test_a_cached_text_serves_either_drafter(lag: int) -> None:
    """One prompt after the other in one engine, each with another method: ids are equal, and a drafter that finds
    what the other one's request has computed accepts what it accepts when all is computed."""
    rig = trained_pair_rig()
    prompt = [token for submit in held_out_requests(6, 1) for token in submit.prompt_ids][:100]
    methods = ("mtp", "dflash", "none", "dflash", "mtp", "auto")
    submits = [request(f"{i} {m}", prompt, 24, draft_method=m) for i, m in enumerate(methods)]
    inbox = OneByOne(submits)
    with step_times(steady):
        rig.engine(inbox, prefix_cache=True, lag=lag, max_step_tokens=512, num_slots=4, prefill_chunk=32).run()
        alone = {m: rig.run([request(m, prompt, 24, draft_method=m)], lag=lag, max_step_tokens=512) for m in methods}
    for submit, method in zip(submits, methods, strict=True):
        last = inbox.last(submit.request_id)
        assert inbox.token_ids(submit.request_id) == alone["none"].ids["none"]
        assert last.speculation == alone[method].speculation
        assert last.cached_tokens == (0 if submit is submits[0] else 96)
    assert alone["mtp"].speculation.accepted > 0
    assert alone["dflash"].speculation.accepted > 0
    assert alone["none"].speculation.drafted == 0


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_ids_with_the_servers_own_choice(adaptive: bool, seed: int | None) -> None:
    """The controller decides by what steps took: other steps with other times, the same ids."""
    rig = trained_pair_rig()
    limits: dict[str, Any] = {"max_step_tokens": 512, "num_slots": 4}
    plain = rig.run(held_out_requests(4, 48, draft_method="none"), **limits)
    watched = WatchedPair(rig, own_drafts)
    with step_times(steady if seed is None else erratic(seed)):
        run = rig.run(held_out_requests(4, 48), drafter=watched, adapt_draft_tokens=adaptive, **limits)
    assert run.ids == plain.ids
    assert run.speculation.accepted > 0
    if seed is None:
        assert {frozenset({0}), frozenset({1})} <= watched.together, "each of them was tried"


def serve_pair(comm: Communicator, directory: Path, paths: tuple[Path, Path], seed: int) -> Any:
    """On each rank: the engine's ids on rank 0, and what every rank proposed."""
    rig = Rig(
        load_model(directory, comm, torch.float64),
        directory,
        drafter_path=paths[0],
        second_drafter_path=paths[1],
        comm=comm,
        num_pages=256,
    )
    watched = WatchedPair(rig, own_drafts)
    limits = {**short_chunks(seed, rig), "drafter": watched}
    with switching_drafters(rig.draft_tokens or {}):
        if comm.rank == 0:
            return rig.run(mixed_requests(seed), **limits).ids, watched.rounds
        rig.engine(None, **limits).run()
    return None, watched.rounds


def test_ids_on_two_ranks(run_on_gang: RunOnGang) -> None:
    directory = tiny_checkpoint("26B-A4B")
    paths = tiny_assistant(directory), tiny_dflash(directory, block_size=BLOCK_SIZE)
    (ids, rounds), (_, theirs) = run_on_gang(2, serve_pair, directory, paths, 2)
    assert ids == plain_ids(directory, 2)
    assert theirs == rounds


def test_a_server_of_two_drafters_warms_up_each_and_tells_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """From settings: blueprint, weights, pools, warm-up; then requests of every method."""
    target = tiny_checkpoint("31B")
    drafters = tiny_assistant(target), tiny_dflash(target)
    config = engine_config(
        target,
        drafter_path=str(drafters[0]),
        second_drafter_path=str(drafters[1]),
        max_step_tokens=256,
        adapt_draft_tokens=True,
    )
    rank = EngineRank(config, SoloCommunicator(), torch.device("cpu"))
    seen: list[tuple[int, ...]] = []
    of = CyclePlan.of

    def noted(scheduled: list[ScheduledRows], sampling: SamplingState) -> CyclePlan:
        seen.append(tuple(r.drafter for r in scheduled if r.num_drafts))
        return of(scheduled, sampling)

    monkeypatch.setattr(CyclePlan, "of", noted)
    rank.warm_up()
    assert {(0,), (1,)} <= set(seen)

    info = rank.model_info()
    assert [(d.method, d.kv, d.num_draft_tokens) for d in info.drafters] == [("mtp", "shared", 4), ("dflash", "own", 7)]
    assert (info.drafter_method, info.num_draft_tokens) == ("mtp+dflash", 7)
    assert [choice.what for choice in info.choices[:3]] == [
        "target attention backend",
        "mtp attention backend",
        "dflash attention backend",
    ]
    assert {group.name for group in rank.rank_info().kv_groups} == {"sliding", "full", "dflash.sliding", "dflash.full"}

    submits = [request(f"{i}", [5, 6 + i, 7], 20, draft_method=METHODS[i % len(METHODS)]) for i in range(5)]
    run = serve(rank, SoloCommunicator(), submits)
    assert run is not None
    assert run.ids == solo_rig(target).run(submits).ids


class Noted:
    """A drafter that notes which sequences it is asked to draft for."""

    weight_bytes = 3

    def __init__(self) -> None:
        self.drafted: list[tuple[int, int, int, list[int]]] = []
        self.num_commits = 0
        self.resets: list[int] = []

    def propose(self, rows: CycleRows, slots: SlotTable) -> None:
        shape = rows.shape
        self.drafted.append((shape.num_drafting, shape.max_drafts, shape.num_block_rows, rows.drafts_A.tolist()))

    def commit(self, rows: CycleRows, *_: Any) -> None:
        self.num_commits += 1

    def reset(self, slot: int) -> None:
        self.resets.append(slot)


def test_each_drafter_is_given_its_own_sequences() -> None:
    first, second = Noted(), Noted()
    pair = DrafterPair([first, second])
    assert pair.weight_bytes == 6

    def rows(*drafts: tuple[int, int]) -> CycleRows:
        scheduled = [
            ScheduledRows(slot=i, start=9, num_known=1, num_drafts=k, samples=True, drafter=d)
            for i, (k, d) in enumerate(drafts)
        ]
        plan = CyclePlan.of(scheduled, NoFeatures())  # type: ignore[arg-type]
        cut_5A = torch.stack([*torch.zeros(3, len(drafts) + 1).long(), plan.table(9)[:, 2], plan.table(9)[:, 3]])
        return CycleRows(plan, cut_5A, plan.table(9))

    nothing: Any = None
    pair.propose(rows((2, 1), (3, 0), (0, 0), (7, 1), (1, 0)), nothing)
    assert first.drafted == [(2, 3, 6, [3, 1, 0, 0, 0, 0])]
    assert second.drafted == [(4, 7, 11, [0, 0, 2, 7, 0, 0])]
    pair.propose(rows((2, 0), (0, 1)), nothing)
    pair.propose(rows((4, 1), (5, 1)), nothing)
    assert first.drafted[1:] == [(1, 2, 3, [2, 0, 0])]
    assert second.drafted[1:] == [(2, 5, 11, [4, 5, 0])]
    accepted_A: Tensor = torch.zeros(3)
    pair.commit(rows((4, 1), (5, 1)), nothing, nothing, nothing, accepted_A)
    assert first.num_commits == second.num_commits == 1
    pair.reset(5)
    assert first.resets == second.resets == [5]


class NoFeatures:
    def features_of(self, _slots: Any) -> None:
        return None


def test_a_request_for_a_drafter_that_is_not_there_drafts_nothing() -> None:
    directory = tiny_checkpoint("31B")
    rig = solo_rig(directory, drafter_path=tiny_assistant(directory))
    inbox = LocalInbox([request("a", [5, 6, 7], 9, draft_method="dflash")])
    rig.engine(inbox).run()
    assert inbox.steps[-1].stats.speculation.drafted == 0
