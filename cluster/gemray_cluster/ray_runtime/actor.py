"""A rank of a gang as a Ray actor: how it is made, and what it learns from Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from gemray_workers.config import EngineConfig
from gemray_workers.errors import CapacityError
from gemray_workers.rank.process import ProcessLocation
from gemray_workers.rank.worker import RankWorker

CONTROL = "control"
"""Group of calls that are answered while `load` or `run` is busy."""
ACTOR_OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {CONTROL: 2}}
"""How a `RankWorker` is made an actor: long calls share one thread, so that `run` may block, and control calls have two
others. Ray never restarts it: a gang with a rank missing is rebuilt as a whole."""
LONG_CALLS = frozenset({RankWorker.load.__name__, RankWorker.run.__name__})
"""Calls that are not control calls."""


def locate_actor(config: EngineConfig) -> ProcessLocation:
    """The node and the card that Ray gave this actor. Raises CapacityError when it has not exactly one card."""
    gpu = gpu_ordinal(ray.get_gpu_ids(), os.environ) if config.device == "cuda" else None
    return ProcessLocation(ray.get_runtime_context().get_node_id(), node_ip(), gpu)


def node_ip() -> str:
    """The address by which other nodes know this one."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def gpu_ordinal(gpu_ids: Sequence[int | str], environment: Mapping[str, str]) -> int:
    """The CUDA ordinal, in this process, of the one card that Ray assigned.

    With RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES every rank sees all cards of its node (symmetric memory needs
    different ordinals on different ranks), so the id is the ordinal unless CUDA_VISIBLE_DEVICES renumbers the cards.

    Raises CapacityError when Ray assigned not exactly one card.
    """
    if len(gpu_ids) != 1:
        raise CapacityError(f"wanted 1 GPU for this rank; available: Ray assigned {list(gpu_ids)}")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return int(gpu_ids[0])
    cards = [card.strip() for card in visible.split(",")]
    if str(gpu_ids[0]) not in cards:
        raise CapacityError(f"Ray assigned GPU {gpu_ids[0]}, but CUDA_VISIBLE_DEVICES = {visible}")
    return cards.index(str(gpu_ids[0]))
