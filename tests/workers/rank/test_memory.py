"""Memory that a start takes, told before it: weights, drafter, KV pages and work space against what is free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemray_workers.errors import CapacityError
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.memory import GIB, MemoryNeeds, free_bytes, require_room
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.heads import other_head, with_head
from support.checkpoints.tiny import SHAPES, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config

CPU = torch.device("cpu")
NEEDS = MemoryNeeds(weights=6 * GIB, drafter=GIB, kv=16 * GIB, work=GIB)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_and_pages_are_those_of_a_loaded_rank(shape: Shape) -> None:
    directory = tiny_checkpoint(shape)
    rank = EngineRank(engine_config(directory), SoloCommunicator(), CPU)
    needs = MemoryNeeds.of(rank._blueprint)
    info = rank.rank_info()
    assert needs.weights == pytest.approx(info.weight_bytes, rel=0.1), (
        "a tiny vocabulary is padded from 259 rows to 320"
    )
    assert needs.weights <= info.weight_bytes, "vocabulary padding aside, nothing is counted that is not held"
    assert needs.kv == rank._pools.num_bytes
    halves = MemoryNeeds.of(Blueprint.of(engine_config(directory, tensor_parallel_size=2)))
    assert needs.weights / 2 < halves.weights < needs.weights


def test_a_head_and_a_drafter_are_counted(tmp_path: Path) -> None:
    source = tiny_checkpoint("31B")
    plain = MemoryNeeds.of(Blueprint.of(engine_config(source)))
    untied = with_head(source, tmp_path / "model", other_head(source))
    assert MemoryNeeds.of(Blueprint.of(engine_config(untied))).weights - plain.weights == other_head(source).numel() * 8
    for drafter in (tiny_assistant(source), tiny_dflash(source)):
        rank = EngineRank(engine_config(source, drafter_path=str(drafter)), SoloCommunicator(), CPU)
        found = MemoryNeeds.of(rank._blueprint).drafter
        assert found == pytest.approx(rank._drafter.weight_bytes, rel=0.1)


def test_what_does_not_fit_is_a_sentence_with_a_remedy() -> None:
    require_room(NEEDS, lambda: 24 * GIB, place="the card")
    with pytest.raises(CapacityError) as error:
        require_room(NEEDS, lambda: 20 * GIB, place="the card")
    assert str(error.value) == (
        "the card has 20.00 GiB of memory free, 24.00 GiB are wanted: weights 7.00 GiB, KV pages 16.00 GiB, work space "
        "1.00 GiB a rank; lower kv_memory to 12.00 GiB at most"
    )
    with pytest.raises(CapacityError, match=r"6\.00 GiB of memory free.*the model alone does not fit: raise tp"):
        require_room(NEEDS, lambda: 6 * GIB, place="the card")
    with pytest.raises(CapacityError, match=r"7\.50 GiB of memory free.*lower max_num_seqs, max_step_tokens"):
        require_room(NEEDS, lambda: 15 * GIB // 2, place="the card")  # the model fits, what one step takes does not
    with pytest.raises(CapacityError, match=r"48\.00 GiB are wanted for 2 ranks.*lower kv_memory to 7\.00 GiB"):
        require_room(NEEDS, lambda: 30 * GIB, place="the host", ranks_there=2)


def test_memory_that_a_dead_process_gives_back_is_waited_for() -> None:
    free = iter([8 * GIB, 24 * GIB])
    require_room(NEEDS, lambda: next(free), place="the card", patience_s=5)
    with pytest.raises(StopIteration):
        next(free)


def test_a_rank_refuses_before_it_takes_anything() -> None:
    before = free_bytes(CPU)
    big = tiny_checkpoint("31B", max_position=1 << 26)
    config = engine_config(big, kv_memory_bytes=400 * GIB, max_model_len=None)
    assert MemoryNeeds.of(Blueprint.of(config)).kv > 300 * GIB
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gemray_workers.rank.target_rank.PATIENCE_S", 0.0)
        with pytest.raises(CapacityError, match=r"rank 0 \(cpu on .*KV pages 400\.00 GiB.*lower kv_memory to"):
            EngineRank(config, SoloCommunicator(), CPU)
    assert abs(before - free_bytes(CPU)) < 8 * GIB
