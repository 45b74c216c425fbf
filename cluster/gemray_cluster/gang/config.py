"""Settings of the control plane: where the cluster is, what a rank is given, how long each wait may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gemray_workers.errors import InvalidField
from gemray_workers.ranges import AT_LEAST_ONE, DURATION, NOT_NEGATIVE, check_ranges, ranged

PlacementStrategy = Literal["auto", "strict_pack", "pack", "spread", "strict_spread"]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How a gang is placed, started and watched."""

    address: str | None = None
    """A running Ray cluster (``host:port`` of its head, or ``auto``); None starts Ray on this machine."""
    connect_deadline_s: float = ranged(DURATION, 30.0)
    """How long the head of a running cluster may take to answer."""
    namespace: str = "gemray"
    """Ray namespace of the gang's actors."""
    local_num_cpus: int | None = ranged(AT_LEAST_ONE, None)
    """CPUs of a Ray that is started here; None takes what the ranks reserve, at most the machine's cores."""
    local_num_gpus: int | None = ranged(NOT_NEGATIVE, None)
    """GPUs of a Ray that is started here; None lets Ray find them."""
    cpus_per_rank: int = ranged(AT_LEAST_ONE, 1)
    """CPUs that each rank reserves."""
    threads_per_rank: int | None = ranged(AT_LEAST_ONE, None)
    """Threads of one operation on CPU tensors. None takes OMP_NUM_THREADS where it is set, else an even share of
    the node's cores (at most 8 for a rank with a GPU)."""
    strategy: PlacementStrategy = "auto"
    """How ranks spread over nodes, in Ray's terms; auto is strict_pack where one node can hold the gang, else pack."""
    placement_deadline_s: float = ranged(DURATION, 120.0)
    """How long to wait for free resources; a node that joins meanwhile counts."""
    start_deadline_s: float = ranged(DURATION, 900.0)
    """How long the ranks may take from placement to ready: processes, weights, warm-up."""
    heartbeat_deadline_s: float = ranged(DURATION, 30.0)
    """Silence of rank 0 after which the gang counts as hung. The engine speaks after each step, and each half second
    when idle, and before it compiles a program, so this must exceed the longest step and the longest compilation."""
    stop_deadline_s: float = ranged(DURATION, 10.0)
    """How long the ranks may take to end in order before they are killed."""

    max_rebuilds: int = ranged(NOT_NEGATIVE, 3)
    """Failures of gangs within 5 minutes after which another gang is built and the live requests replayed."""

    def __post_init__(self) -> None:
        if self.address is not None and not self.address:
            raise InvalidField("address", self.address, "host:port of a Ray head, auto, or unset")
        if not self.namespace:
            raise InvalidField("namespace", self.namespace, "a name")
        check_ranges(self)
        for name in ("local_num_cpus", "local_num_gpus"):
            if self.address is not None and getattr(self, name) is not None:
                raise InvalidField(name, getattr(self, name), f"unset: the cluster at {self.address} has its own")
        if self.strategy not in get_args(PlacementStrategy):
            raise InvalidField("strategy", self.strategy, "one of " + ", ".join(get_args(PlacementStrategy)))
