"""Memory that a start takes, told before it: weights, drafter, KV pages and work space against what is free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gemray_workers.config import EngineConfig
from gemray_workers.errors import CapacityError
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.memory import GIB, MemoryNeeds, free_bytes, memory_info, require_room
from gemray_workers.rank.target_rank import EngineRank
from support.checkpoints.heads import other_head, with_head
from support.checkpoints.tiny import SHAPES, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config

CONFIGS = Path(__file__).resolve().parents[3] / "benchmarks" / "configs"
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
        halves = engine_config(source, drafter_path=str(drafter), tensor_parallel_size=2)
        assert MemoryNeeds.of(Blueprint.of(halves)).drafter == found // 2


def published(name: str, **changes: Any) -> MemoryNeeds:
    config = EngineConfig(
        model_path=str(CONFIGS / name),
        tensor_parallel_size=1,
        dtype="bfloat16",
        device="cpu",
        kv_memory_bytes=4 * GIB,
        random_weights=True,
        **changes,
    )
    return MemoryNeeds.of(Blueprint.of(config))


def test_prompts_over_packed_weights_have_room_for_a_layers_numbers() -> None:
    """Gate and up of 21,504 rows each are the most that is written down at one time."""
    packed, plain = published("31B-it-w4a16"), published("31B-it")
    assert packed.work - plain.work == 2 * 21504 * 5376 * 2
    assert packed.weights < plain.weights / 2


def test_logits_are_those_of_rows_that_choose() -> None:
    """In E2B a row's logits, 262,144 numbers of 4 bytes, are more than the rest of its step."""
    few, many = (published("E2B-it", max_num_seqs=seqs, max_step_tokens=4096) for seqs in (1, 4096))
    assert many.work - few.work > 3 << 30
    assert few.work < 4096 * 262144 * 4 / 4


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


class Card:
    """80 GiB, of which 20 are free and the process's allocator holds 55."""

    total = 80 * GIB

    def free(self) -> int:
        return 20 * GIB

    def reserved(self) -> int:
        return 55 * GIB


def test_what_the_allocator_keeps_is_nobody_elses() -> None:
    """A rank knows 53 GiB of the 60 that are not free, its allocator keeps 2 more, and the other 5 are elsewhere."""
    sizes = {"weights": 30, "drafter": 1, "kv": 20, "graphs": 2, "work": 4, "kv_budget": 20}
    card: Any = Card()
    info = memory_info(torch.device("cuda"), card, **{name: size * GIB for name, size in sizes.items()})
    assert (info.total, info.elsewhere, info.headroom) == (80 * GIB, 5 * GIB, (80 - 5 - 53 - 4) * GIB)


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
