"""KV memory that gangs find: what follows a failed gang has no more of it, and what no longer fits fails clearly."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from typing_extensions import override

from gemray_cluster.gang.client import GangState, GangUnavailable, NoLongerFits
from gemray_cluster.gang.found_memory import FoundMemory, memory_line, tell_memory
from gemray_cluster.gang.replay import Replays
from gemray_workers.config import EngineConfig, KVMemory
from gemray_workers.messages import GangInfo, MemoryInfo, SequenceDelta, Submit
from gemray_workers.sampling.params import SamplingParams
from support.cluster.fake_gang import FakeGang, gang_info

GIB = 1 << 30
ENGINE = EngineConfig(model_path="/m", tensor_parallel_size=2, dtype="bfloat16", device="cuda")


def memory(kv_budget: int) -> MemoryInfo:
    return MemoryInfo(
        total=80 * GIB, weights=30 * GIB, drafter=GIB, kv=kv_budget - 1, graphs=GIB, work=2 * GIB, elsewhere=3 * GIB,
        headroom=8 * GIB, kv_budget=kv_budget,
    )  # fmt: skip


def info(*budgets: int, drafter: int | None = None) -> GangInfo:
    """A gang whose ranks found so much."""
    gang = gang_info()
    ranks = [msgspec.structs.replace(gang.ranks[0], rank=i, memory=memory(budget)) for i, budget in enumerate(budgets)]
    if drafter is not None:
        ranks.append(msgspec.structs.replace(gang.ranks[0], role="drafter", memory=memory(drafter)))
    return msgspec.structs.replace(gang, ranks=ranks)


def test_the_first_gang_bounds_those_that_follow() -> None:
    """Also when one between them had less: the next may have as much again."""
    found = FoundMemory(ENGINE)
    assert found.next_engine([]).most_kv_memory is None
    assert found.next_engine([gang_info()]).most_kv_memory is None, "ranks that tell nothing bound nothing"
    first = found.next_engine([info(9, 9, drafter=5), info(8, 8, drafter=6)])
    assert first.most_kv_memory == KVMemory(8, 5)
    assert found.next_engine([info(4, 4, drafter=4)]) == first
    assert FoundMemory(ENGINE).next_engine([info(9, 9)]).most_kv_memory == KVMemory(9, 9)


def test_a_stated_size_stays() -> None:
    engine = EngineConfig(model_path="/m", tensor_parallel_size=1, dtype="float32", device="cpu", kv_memory_bytes=7)
    assert FoundMemory(engine).next_engine([info(3)]) is engine


def test_a_rank_tells_where_its_memory_is() -> None:
    rank = info(35 * GIB).ranks[0]
    assert rank.memory is not None
    assert memory_line(rank, rank.memory) == (
        "memory of rank 0 (cpu on host), 80.00 GiB in all: weights 30.00; drafter 1.00; KV pages (sliding 0.00, full "
        "0.00) 35.00; graphs 1.00; work space 2.00; elsewhere 3.00; headroom 8.00"
    )


def test_the_log_says_whose_rank_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tell_memory(info(35 * GIB), "replica 1")
    assert caplog.messages[0].startswith("replica 1: memory of rank 0 (cpu on host), ")


class DyingGang(FakeGang):
    """Fails once a request has five tokens."""

    @override
    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        yield SequenceDelta(request_id=submit.request_id, token_ids=[1, 2, 3, 4, 5])
        self.state = GangState.FAILED
        raise GangUnavailable("rank 1 died")


class ShortGang(FakeGang):
    """Cuts requests at its longest length, as the engine does."""

    @override
    async def generate(self, submit: Submit) -> AsyncGenerator[SequenceDelta, None]:
        room = self.info.model.max_model_len - len(submit.prompt_ids) - len(submit.emitted_ids)
        count = min(room, submit.params.max_tokens - len(submit.emitted_ids))
        yield SequenceDelta(request_id=submit.request_id, token_ids=[6] * count, finish="length")


async def run_over(max_model_len: int, max_tokens: int) -> list[int]:
    second = ShortGang(gang_info=gang_info(max_model_len=max_model_len))

    async def gang_after(*_: Any) -> FakeGang:
        return second

    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, max_tokens=max_tokens)
    submit = Submit(request_id="r", prompt_ids=[1] * 10, params=params)
    gang: FakeGang = DyingGang()
    return [token async for delta in Replays().run(submit, gang, gang_after) for token in delta.token_ids]


async def test_a_request_goes_on_in_a_smaller_gang_while_it_fits() -> None:
    assert await run_over(max_model_len=20, max_tokens=10) == [1, 2, 3, 4, 5, 6, 6, 6, 6, 6]


@pytest.mark.parametrize(("max_model_len", "num_tokens"), [(15, 15), (12, 15), (18, 18)])
async def test_a_request_that_no_longer_fits_says_so(max_model_len: int, num_tokens: int) -> None:
    """At once where its text is too long already, else where it would be cut short of what it asked for."""
    with pytest.raises(
        NoLongerFits, match=f"memory for {max_model_len} tokens a request: this one has {num_tokens} and wants more"
    ):
        await run_over(max_model_len, max_tokens=10)
