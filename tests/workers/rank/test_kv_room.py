"""KV memory that is found: the arithmetic, what ranks agree on, and what is said when there is too little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemray_workers.config import KVMemory
from gemray_workers.errors import CapacityError, InvalidField
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.rank.kv_room import (
    LEAST_HEADROOM,
    SEGMENT,
    USEFUL_LEN,
    KVRoom,
    card_room,
    draw,
    host_room,
    settle,
)
from gemray_workers.rank.memory import GIB
from support.checkpoints.tiny import tiny_checkpoint
from support.engine.engine_runner import engine_config

H100: dict[str, Any] = {
    "total": 80 * GIB,
    "free": 79 * GIB,
    "outside": GIB,
    "weights": 30 * GIB,
    "drafter": GIB,
    "work": 2 * GIB,
    "graphs": GIB,
    "utilization": 0.9,
    "num_tensors": 512,
}
"""34 GiB beside pages, 1 GiB of which rounding may cost, and 1 GiB outside the allocator."""


def on_card(**changes: Any) -> int:
    return card_room(**{**H100, **changes}).num_bytes


@pytest.mark.parametrize(
    ("changes", "gib"),
    [
        ({}, 72 - 1 - 35),
        ({"utilization": 0.5}, 40 - 1 - 35),
        ({"utilization": 1.0}, 79 - 2.5 - 35),
        # Another server has 40 GiB of the card: this one takes what is left, whatever its share would allow.
        ({"free": 39 * GIB}, 39 - 2.5 - 35),
        ({"free": 30 * GIB}, 30 - 2.5 - 35),
        ({"num_tensors": 0}, 72 - 1 - 34),
    ],
)
def test_a_card_of_80_gib(changes: dict[str, Any], gib: float) -> None:
    assert on_card(**changes) == gib * GIB


@given(
    sizes=st.tuples(*[st.integers(0, 200 * GIB)] * 6),
    total=st.integers(GIB, 200 * GIB),
    utilization=st.floats(0.01, 1.0),
    num_tensors=st.integers(0, 500),
)
def test_what_is_taken_leaves_the_headroom_and_keeps_to_the_share(
    sizes: tuple[int, ...], total: int, utilization: float, num_tensors: int
) -> None:
    free, outside, weights, drafter, work, graphs = sizes
    room = card_room(
        total=total,
        free=min(free, total),
        outside=outside,
        weights=weights,
        drafter=drafter,
        work=work,
        graphs=graphs,
        utilization=utilization,
        num_tensors=num_tensors,
    )
    if room.num_bytes <= 0:
        return
    taken = room.held + room.num_bytes + num_tensors * SEGMENT
    assert min(free, total) - taken >= total // LEAST_HEADROOM
    assert taken + outside <= total * utilization


def test_ranks_of_a_host_share_a_quarter_of_what_is_free() -> None:
    assert host_room(total=64 * GIB, free=32 * GIB, weights=GIB, drafter=0, ranks_here=2).num_bytes == 4 * GIB


ROOM = KVRoom(8 * GIB, 80 * GIB, 79 * GIB, 30 * GIB, GIB, 2 * GIB, GIB, GIB)


def rooms_of(*gib: float) -> list[KVRoom]:
    return [replace(ROOM, num_bytes=int(g * GIB)) for g in gib]


def test_the_tightest_rank_of_the_target_decides() -> None:
    assert settle(rooms_of(8, 6, 7), 3) == KVMemory(6 * GIB, 6 * GIB)
    assert settle(rooms_of(8, 6, 30), 2) == KVMemory(6 * GIB, 30 * GIB)
    assert settle(rooms_of(8, 6, 2), 2) == KVMemory(6 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("found", "taken"),
    [(20.0, 10.0), (10.0, 10.0), (9.95, 10.0), (9.8, 9.8), (1.0, 1.0)],
)
def test_a_rebuilt_gang_takes_no_more_than_the_one_before(found: float, taken: float) -> None:
    """What measures a hundredth less takes as much: else each rebuild would serve a little less."""
    most = KVMemory(10 * GIB, 10 * GIB)
    assert settle(rooms_of(found), 1, most).target == int(taken * GIB)


CONFIG = replace(engine_config(tiny_checkpoint("31B"), max_model_len=None, max_step_tokens=None), kv_memory_bytes=None)


def test_the_pools_take_what_was_found() -> None:
    drawn = draw(CONFIG, KVMemory(8 << 20, 8 << 20), rooms_of(1))
    stated = Blueprint.of(replace(CONFIG, kv_memory_bytes=8 << 20))
    assert drawn.pools == stated.pools
    assert drawn.kv == KVMemory(8 << 20, 8 << 20)
    (told,) = [choice for choice in drawn.model_info().choices if choice.what == "KV memory"]
    assert told.chosen == "0.01 GiB"
    assert not [choice for choice in stated.model_info().choices if choice.what == "KV memory"]


def test_too_little_says_whose_memory_and_what_should_fit() -> None:
    """Half a GiB is missing; a smaller batch saves more than that of work space and graphs."""
    config = replace(CONFIG, max_num_seqs=32, max_step_tokens=512)
    with pytest.raises(CapacityError) as error:
        draw(config, KVMemory(-GIB // 2, -GIB // 2), rooms_of(2, -0.5))
    assert str(error.value) == (
        "rank 1 has no memory for KV pages: of 80.00 GiB it can have 79.00 GiB, of which weights take 30.00 GiB, "
        "drafters 1.00 GiB, the work space of the largest step 2.00 GiB and graphs 1.00 GiB, and 45.50 GiB are to stay "
        "free; max_num_seqs = 32, max_step_tokens = 96 and prefill_chunk = 64 should fit, with requests of up to about "
        "4096 tokens"
    )


def test_a_smaller_batch_saves_of_the_graphs_what_its_cycles_are_less() -> None:
    """A quarter of a GiB is missing, and half of a GiB of graphs is those of 17 to 32 sequences."""
    config = replace(CONFIG, max_num_seqs=32, max_step_tokens=512)
    with pytest.raises(CapacityError, match=r"max_num_seqs = 16, .* should fit"):
        draw(config, KVMemory(-GIB // 4, -GIB // 4), [replace(ROOM, num_bytes=-GIB // 4, work=0, graphs=GIB)])


def test_a_length_that_nobody_can_use_is_refused() -> None:
    """A page or two would do for requests of 20 tokens."""
    few = replace(CONFIG, max_model_len=20)
    assert draw(few, KVMemory(1 << 20, 1 << 20), rooms_of(1)).pools.max_model_len == 20
    least = 200_000
    assert Blueprint.of(CONFIG, KVMemory(least, least)).pools.max_model_len < USEFUL_LEN
    with pytest.raises(CapacityError, match="rank 0 has no memory for KV pages"):
        draw(CONFIG, KVMemory(least, least), [replace(ROOM, num_bytes=least, work=0, graphs=0)])


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (30, "raise gpu_memory_utilization"),
        (77, "give other processes on the card less"),  # the GiB that is left is less than the headroom
        (78, "give other processes on the card less"),
    ],
)
def test_where_no_batch_fits_it_says_what_to_change(weights: int, words: str) -> None:
    room = replace(ROOM, num_bytes=-GIB, weights=weights * GIB, work=0, graphs=0)
    with pytest.raises(CapacityError, match=words):
        draw(CONFIG, KVMemory(-GIB, -GIB), [room])


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_that_cannot_be(share: float) -> None:
    with pytest.raises(InvalidField, match=r"gpu_memory_utilization = .* a number > 0 and <= 1"):
        replace(CONFIG, gpu_memory_utilization=share)
