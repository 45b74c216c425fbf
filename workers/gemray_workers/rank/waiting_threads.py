"""How the threads of a rank's process wait for each other while they share an operation on a CPU.

torch computes by GNU's OpenMP, in which a thread that is done turns 300,000 times before it sleeps. On a core of its
own it need not be woken that way. Where other processes want the cores, the thread that it waits for has none, and it
keeps one from it: two threads on two busy cores took 560 to 1,060 ms a token, with 1,000 turns 26 to 35
(`benchmarks/results/2026-11-29-start`). 1,000 is what OpenMP takes by itself where a process has more threads than
cores; of other processes it cannot know.
"""

from __future__ import annotations

from collections.abc import Mapping

SPINS, POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
FEW_SPINS = "1000"


def waiting_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a rank's process, which OpenMP reads when torch is imported.

    Args:
        environment: what the user has set; that stays.
    """
    said = {name: environment[name] for name in (SPINS, POLICY) if environment.get(name)}
    return said or {SPINS: FEW_SPINS}
