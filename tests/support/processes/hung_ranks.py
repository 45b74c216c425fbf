"""What torch's flight recorder has left of a rank whose collectives hung on a card.

NCCL's watchdog writes it before it ends the process. With TORCH_NCCL_ENABLE_TIMING=1 it knows what a card has begun:
the first collective that has not ended is `started` where it hangs itself, and `scheduled` where a kernel before it
does.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from gemray_workers.rank.whereabouts import unfinished, unfinished_entries

FLIGHT_RECORDS = "nccl-"
"""Begins the names of the records' files, behind which torch puts the rank's number."""


def of_flight_record(path: Path) -> str:
    """Its first collective without an end, with the lines of Python that began it; empty where there is no record."""
    if not path.exists():
        return ""
    recorded = pickle.loads(path.read_bytes())
    told = f"torch's flight recorder: {unfinished(recorded) or 'every collective has ended'}"
    frames: list[dict[str, Any]] = next((entry.get("frames", []) for entry in unfinished_entries(recorded)), [])
    return "\n".join([told, *(f"  {f['filename']}:{f['line']} {f['name']}" for f in frames)])
