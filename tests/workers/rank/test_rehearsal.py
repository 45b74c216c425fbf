"""KV memory found on a card that is made up: the order of what is taken, tried out and given back."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemray_workers.config import EngineConfig, KVMemory
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.errors import CapacityError
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.drafter_rank import DrafterRank
from gemray_workers.rank.kv_room import LEAST_HEADROOM, find_kv_memory
from gemray_workers.rank.largest_step import prompt_lengths
from gemray_workers.rank.rehearsal import GraphsToCapture, PresentBytes, rehearse, told_as_capacity
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import Run, engine_config, request, run_engine, serve
from support.engine.fake_card import MIB, FakeCard, FakeGraphs
from support.processes.gang import RunOnGang

CPU = torch.device("cpu")


def auto(model: Path, **changes: Any) -> EngineConfig:
    return engine_config(model, **{"kv_memory_bytes": None, "max_model_len": None, **changes})


def loaded(config: EngineConfig, card: FakeCard, comm: Communicator | None = None) -> EngineRank:
    card.rank = EngineRank(config, comm or SoloCommunicator(), CPU, card=card)
    return card.rank


SUBMITS = [request(f"r{i}", [5 + i] * (3 + 9 * i), 12) for i in range(6)]


@pytest.mark.parametrize("method", ["none", "mtp", "dflash", "both"])
def test_pools_get_what_is_left_and_ids_stay(method: str) -> None:
    """The caches of model and drafters show the new pools: with those of the rehearsal all ids would be others."""
    model = tiny_checkpoint("31B")
    paths = [
        str(make(model))
        for name, make in (("mtp", tiny_assistant), ("dflash", tiny_dflash))
        if method in (name, "both")
    ]
    drafters = dict(zip(("drafter_path", "second_drafter_path"), paths, strict=False))
    config = auto(model, **drafters)
    card = FakeCard(total=64 * MIB, work=5 * MIB, own_outside=3 * MIB)
    rank = loaded(config, card)
    small = sum(pools.num_bytes for pools in rank._all_pools)
    find_kv_memory(rank, SoloCommunicator(), config)
    info = rank.rank_info().memory
    assert info is not None
    assert info.kv == sum(pools.num_bytes for pools in rank._all_pools) > small
    assert info.kv <= info.kv_budget
    assert info.work == 5 * MIB
    parts = (info.weights, info.drafter, info.kv, info.graphs, info.work, info.elsewhere, info.headroom)
    assert sum(parts) == info.total == 64 * MIB
    assert info.headroom >= 64 * MIB * 0.1 - card.own_outside
    run = serve(rank, SoloCommunicator(), SUBMITS)
    stated = run_engine(SoloCommunicator(), engine_config(model, max_model_len=None, **drafters), SUBMITS)
    assert run is not None
    assert stated is not None
    assert run.ids == stated.ids


def test_order_of_a_start() -> None:
    """The peak is taken over small pools, and what the step left is given back before the real pools are made, which
    the small ones do not lie beside."""
    config = auto(tiny_checkpoint("31B"))
    card = FakeCard(total=64 * MIB, work=5 * MIB)
    rank = loaded(config, card)
    weights, small = rank._model.weight_bytes, rank._pools.num_bytes
    find_kv_memory(rank, SoloCommunicator(), config)
    assert card.calls == [
        f"give back with {weights + small} in use",
        "restart",
        f"peak with {weights + small} in use",
        f"give back with {weights + small} in use",
        f"give back with {weights} in use",
    ]


@pytest.mark.parametrize(("num_all", "num_tried"), [(2, 2), (3, 3), (4, 4), (72, 4)])
def test_graphs_are_told_from_the_largest_few(num_all: int, num_tried: int) -> None:
    card = FakeCard(total=64 * MIB)
    graphs = FakeGraphs(card, num_all, pool=3 * MIB, driver=1 << 14, kernels=2 * MIB)
    room = rehearse(
        card,
        PresentBytes(weights=0, drafter=0, pools=0, num_pool_tensors=0),
        utilization=0.9,
        run=lambda: None,
        graphs=lambda: GraphsToCapture(graphs, num_all),
    )
    assert graphs.num_captured == num_tried
    assert room.graphs == 2 * 3 * MIB + 2 * MIB + num_all * (1 << 14)


def test_graphs_that_are_captured_at_use_are_the_largest_few() -> None:
    card = FakeCard(total=64 * MIB)
    graphs = FakeGraphs(card, 72, pool=3 * MIB, driver=1 << 14, kernels=0)
    present = PresentBytes(weights=0, drafter=0, pools=0, num_pool_tensors=0)
    found = GraphsToCapture(graphs, 0)
    room = rehearse(card, present, utilization=0.9, run=lambda: None, graphs=lambda: found)
    assert room.graphs == 2 * (3 * MIB + (1 << 14))


def test_the_second_server_takes_what_the_first_one_left() -> None:
    config = auto(tiny_checkpoint("31B", max_position=1 << 20))
    budgets = []
    for others in (0, 30 * MIB):
        card = FakeCard(total=100 * MIB, others=others)
        rank = loaded(config, card)
        find_kv_memory(rank, SoloCommunicator(), config)
        info = rank.rank_info().memory
        assert info is not None
        budgets.append(info.kv_budget)
        assert card.free() >= 100 * MIB // LEAST_HEADROOM
    # 90 of 100 MiB are its share; then 30 are gone, and all but a 32nd of the rest is taken.
    assert budgets[0] - budgets[1] == 30 * MIB - (10 * MIB - 100 * MIB // LEAST_HEADROOM)


@pytest.mark.parametrize(("max_position", "needs_it"), [(4096, False), (1 << 20, True)])
def test_less_memory_than_the_gang_before_found_is_told_where_it_costs_pages(
    max_position: int, needs_it: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = auto(tiny_checkpoint("31B", max_position=max_position))
    loaded_rank = loaded(config, FakeCard(total=100 * MIB))
    find_kv_memory(loaded_rank, SoloCommunicator(), config)
    info = loaded_rank.rank_info().memory
    assert info is not None
    before = KVMemory(info.kv_budget, info.kv_budget)
    config = replace(config, most_kv_memory=before)
    for others in (0, 15 * MIB):
        caplog.clear()
        rank = loaded(config, FakeCard(total=100 * MIB, others=others))
        find_kv_memory(rank, SoloCommunicator(), config)
        assert ("the gang before had" in caplog.text) is (others > 0 and needs_it)


def test_the_largest_step_is_run() -> None:
    """As many sequences as may run, a step's rows, and everything that takes tables or working memory."""
    config = auto(tiny_checkpoint("31B"), drafter_path=str(tiny_assistant(tiny_checkpoint("31B"))), num_draft_tokens=3)
    rank = loaded(config, FakeCard(total=64 * MIB))
    rows, sequences, features = [], [], []
    fit = rank._parts(rank._drafter).cycle().__class__.fit

    def watched(self: Any, plan: Any) -> Any:
        rows.append(plan.shape.num_rows)
        sequences.append((plan.shape.num_choosing, plan.shape.max_drafts))
        features.append(plan.features)
        return fit(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gemray_workers.engine.cycle.Cycle.fit", watched)
        rank.kv_room(1)
    assert max(rows) == config.max_step_tokens
    assert (config.max_num_seqs, 3) in sequences
    assert all(f.penalties and f.bias for f in features)
    lengths = prompt_lengths(config, 3, 4096)
    assert len(lengths) == config.max_num_seqs
    assert max(lengths) == config.prefill_chunk


@pytest.mark.parametrize(("longest", "num_seqs"), [(2, 1), (3, 8), (9, 3), (40, 1)])
def test_small_settings_rehearse(longest: int, num_seqs: int) -> None:
    config = auto(tiny_checkpoint("31B"), max_model_len=longest, max_num_seqs=num_seqs)
    rank = loaded(config, FakeCard(total=64 * MIB))
    find_kv_memory(rank, SoloCommunicator(), config)
    assert rank.model_info().max_model_len == longest


def test_memory_that_is_gone_when_it_is_taken_is_a_sentence() -> None:
    config = auto(tiny_checkpoint("31B"))
    rank = loaded(config, FakeCard(total=64 * MIB))
    with pytest.MonkeyPatch.context() as patch:

        def vanish(*_args: Any, **_kwargs: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

        rank.kv_room(1)
        patch.setattr("gemray_workers.kv.pool._zeros", vanish)
        with pytest.raises(
            CapacityError,
            match=r"^rank 0 \(cpu on .*\) ran out of memory for 0\.0\d GiB of KV pages, which were free a moment ago: "
            r"another process has taken memory there; .*Tried to allocate 2\.00 GiB\.$",
        ):
            rank.size_pools(Blueprint.of(replace(config, kv_memory_bytes=32 * MIB)))


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^shape$"), told_as_capacity("a card", "while it computed"):
        raise RuntimeError("shape")
    with (
        pytest.raises(CapacityError, match="a host ran out of memory for pages"),
        told_as_capacity("a host", "for pages"),
    ):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")


def _serve_dedicated(gang: TorchCommunicator, config: EngineConfig, totals: list[int]) -> tuple[Any, Run | None]:
    """Ranks on cards of different sizes: two of the target, one of the drafter."""
    card = FakeCard(total=totals[gang.rank])
    if gang.rank == config.tensor_parallel_size:
        drafter = card.rank = DrafterRank(config, gang, CPU, card=card)
        find_kv_memory(drafter, gang, config)
        drafter.engine().run()
        return drafter.rank_info().memory, None
    target = gang.subgroup(config.tensor_parallel_size, "target")
    rank = card.rank = EngineRank(config, target, CPU, gang=gang, card=card)
    find_kv_memory(rank, gang, config)
    inbox = LocalInbox(SUBMITS) if target.rank == 0 else None
    rank.engine(inbox).run()
    if inbox is None:
        return rank.rank_info().memory, None
    return rank.rank_info().memory, {s.request_id: inbox.token_ids(s.request_id) for s in SUBMITS}  # type: ignore[return-value]


def test_ranks_and_a_drafter_on_its_own_agree(run_on_gang: RunOnGang) -> None:
    model = tiny_checkpoint("31B")
    changes: dict[str, Any] = {"drafter_path": str(tiny_dflash(model)), "drafter_placement": "dedicated"}
    config = auto(model, tensor_parallel_size=2, **changes)
    (one, ids), (two, _), (own, _) = run_on_gang(3, _serve_dedicated, config, [80 * MIB, 60 * MIB, 50 * MIB])
    assert one.kv_budget == two.kv_budget < 54 * MIB
    assert one.kv == two.kv
    assert own.kv_budget < 45 * MIB
    assert own.kv_budget != one.kv_budget
    plain = run_engine(SoloCommunicator(), engine_config(model), SUBMITS)
    assert plain is not None
    assert ids == plain.ids
    gc.collect()
