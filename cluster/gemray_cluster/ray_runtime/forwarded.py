"""Variables that hold for every rank: a network interface that was chosen by hand must hold on all nodes, and what
torch is to record of collectives that hang."""

from __future__ import annotations

from collections.abc import Mapping

FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_")


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of the coordinator's `environment` that every rank is given."""
    return {name: value for name, value in environment.items() if name.startswith(FORWARDED_PREFIXES)}
