"""Where the ranks of a gang stand that is silent: who waits in which collective, and who did not come to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from gemray_cluster.gang.launcher import Rank
from gemray_workers.rank.process import RankFacts
from gemray_workers.rank.whereabouts import Whereabouts
from gemray_workers.rank.worker import RankWorker

ANSWER_S = 3.0
"""How long a rank may take to say what it does: threads of its own answer, which need Python's lock alone."""
_STATES = {
    psutil.STATUS_STOPPED: "its process is stopped, as by SIGSTOP",
    psutil.STATUS_TRACING_STOP: "a debugger has stopped its process",
    psutil.STATUS_DISK_SLEEP: "its process waits in the kernel",
    psutil.STATUS_ZOMBIE: "its process has ended",
}
"""States of processes in which none answers."""


@dataclass(frozen=True)
class Found:
    """What is known of one rank."""

    rank: int
    facts: RankFacts | None
    """None before it has said who it is."""
    whereabouts: Whereabouts | None
    """None where it gave no answer."""
    state: str | None = None
    """Why not, if that is known."""


async def ask(ranks: Mapping[int, Rank], facts: Sequence[RankFacts], node_id: str | None) -> list[Found]:
    """What each of `ranks` does, in rank order, within `ANSWER_S`.

    Args:
        ranks: that may answer, by number.
        facts: of all ranks of the gang, or nothing where they are not known.
        node_id: of this side: processes of this machine can be looked at, too.
    """

    async def asked(number: int, rank: Rank) -> Found:
        fact = facts[number] if facts else None
        try:
            async with asyncio.timeout(ANSWER_S):
                return Found(number, fact, await rank.call(RankWorker.whereabouts))
        except Exception:  # Ray's errors have no common base
            state = _state_of(fact.pid) if fact is not None and fact.node_id == node_id else None
            return Found(number, fact, None, state)

    return list(await asyncio.gather(*(asked(number, rank) for number, rank in sorted(ranks.items()))))


def in_a_line(found: Sequence[Found]) -> str:
    """Who waits where, and for whom."""
    most: dict[str, int] = {}
    for one in found:
        for exchanges in one.whereabouts.exchanges if one.whereabouts else ():
            most[exchanges.group] = max(most.get(exchanges.group, 0), exchanges.begun)
    return "; ".join(_told(one, most) for one in found)


def with_stacks(found: Sequence[Found]) -> str:
    """What each rank's threads do, in lines."""
    return "\n".join(
        f"{_who(one)}: {_device(one.whereabouts)}\n{one.whereabouts.stacks}" for one in found if one.whereabouts
    )


def _told(one: Found, most: Mapping[str, int]) -> str:
    """One rank in words; `most` is how many collectives any rank has begun, by group."""
    where = one.whereabouts
    if where is None:
        return f"{_who(one)} gives no answer" + (f": {one.state}" if one.state else "")
    parts = [f"is at {where.at}"] if where.at else []
    for exchanges in where.exchanges:
        if exchanges.inside is not None:
            number = f"{exchanges.inside}, collective {exchanges.begun} of the {exchanges.group}"
            parts.append(f"has been in {number}, for {exchanges.seconds:.1f} s")
        if exchanges.begun < most[exchanges.group]:
            parts.append(
                f"did not come to collective {most[exchanges.group]} of the {exchanges.group}, "
                f"having begun {exchanges.begun}"
            )
    return f"{_who(one)} {' and '.join(parts) or 'answers'}"


def _who(one: Found) -> str:
    return f"rank {one.rank}" + (f" (pid {one.facts.pid} on {one.facts.host})" if one.facts else "")


def _device(where: Whereabouts) -> str:
    return where.device or "no collective is known to be left on its device"


def _state_of(pid: int) -> str | None:
    """Why a process of this machine does not answer, where its state tells."""
    try:
        return _STATES.get(psutil.Process(pid).status())
    except psutil.Error:
        return None
