"""Who is said to wait for whom."""

from __future__ import annotations

import os

import pytest

from gemray_cluster.gang import whereabouts
from gemray_cluster.gang.launcher import RankDied
from gemray_cluster.gang.whereabouts import Found, ask, in_a_line, with_stacks
from gemray_workers.parallel.exchanges import Exchanges
from gemray_workers.rank.process import RankFacts
from gemray_workers.rank.whereabouts import Whereabouts


def facts(pid: int, node_id: str = "here") -> RankFacts:
    return RankFacts(node_id=node_id, node_ip="127.0.0.1", host="h", pid=pid, cores=1, versions={})


def at(where: str, *exchanges: tuple[str, int, str | None], device: str = "") -> Whereabouts:
    return Whereabouts(
        exchanges=[Exchanges(group=g, begun=n, inside=verb, seconds=2.0 if verb else 0.0) for g, n, verb in exchanges],
        at=where,
        device=device,
        stacks=f"MainThread:\n  {where}",
    )


class Asked:
    """A rank that gives an answer, or raises it."""

    def __init__(self, answer: Whereabouts | Exception) -> None:
        self._answer = answer

    async def call(self, method: object) -> Whereabouts:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def test_ranks_are_compared_within_each_group() -> None:
    """The drafter's rank is in no collective of the target's ranks."""
    found = [
        Found(0, facts(7), at("m.f:1", ("gang", 9, None), ("target", 5, "all_reduce"))),
        Found(1, facts(8), at("m.g:2", ("gang", 9, None), ("target", 4, None))),
        Found(2, facts(9), at("m.h:3", ("gang", 9, "broadcast"))),
    ]
    assert in_a_line(found) == (
        "rank 0 (pid 7 on h) is at m.f:1 and has been in all_reduce, collective 5 of the target, for 2.0 s; "
        "rank 1 (pid 8 on h) is at m.g:2 and did not come to collective 5 of the target, having begun 4; "
        "rank 2 (pid 9 on h) is at m.h:3 and has been in broadcast, collective 9 of the gang, for 2.0 s"
    )


def test_what_is_not_known_is_left_out() -> None:
    assert in_a_line([Found(0, None, None), Found(1, None, at(""))]) == "rank 0 gives no answer; rank 1 answers"
    assert with_stacks([Found(0, None, None)]) == ""


def test_stacks_come_with_what_a_card_has_not_ended() -> None:
    told = with_stacks([Found(1, facts(8), at("m.g:2", device="nccl:all_reduce number 8 is started"))])
    assert told == "rank 1 (pid 8 on h): nccl:all_reduce number 8 is started\nMainThread:\n  m.g:2"


async def test_a_rank_that_gives_no_answer_is_looked_at_on_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[int] = []

    def state_of(pid: int) -> str:
        states.append(pid)
        return "its process has ended"

    monkeypatch.setattr(whereabouts, "_state_of", state_of)
    ranks = {2: Asked(at("m.h:3")), 0: Asked(RankDied("gone")), 1: Asked(RankDied("gone"))}
    found = await ask(ranks, [facts(7), facts(8, "there"), facts(9)], "here")  # type: ignore[arg-type]
    assert in_a_line(found) == (
        "rank 0 (pid 7 on h) gives no answer: its process has ended; rank 1 (pid 8 on h) gives no answer; "
        "rank 2 (pid 9 on h) is at m.h:3"
    )
    assert states == [7]


def test_a_process_that_could_answer_has_no_state_to_tell() -> None:
    assert whereabouts._state_of(os.getpid()) is None
    assert whereabouts._state_of(2**22 + 1) is None, "no process has this number"
