"""What Ray has placed, asked of its GCS without joining the cluster."""

from __future__ import annotations

from typing import Any

import psutil
from ray import _raylet
from ray._private.state import GlobalState

HELD = ("PENDING", "PREPARED", "CREATED", "RESCHEDULING")


def num_placement_groups(gcs_address: str) -> int:
    """Placement groups that hold resources or wait for them."""
    state = GlobalState()
    gcs_client_options: Any = vars(_raylet)["GcsClientOptions"]  # not in the stubs
    options = gcs_client_options.create(gcs_address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
    state._initialize_global_state(options)
    try:
        groups = state.placement_group_table()
        return sum(group["state"] in HELD for group in groups.values())
    finally:
        state.disconnect()


def gcs_address_of(raylet: psutil.Process) -> str:
    """HOST:PORT of the GCS that a raylet belongs to."""
    (flag,) = [part for part in raylet.cmdline() if part.startswith("--gcs-address=")]
    return flag.partition("=")[2]
