"""The kind of device that a gang's ranks compute on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from gemray_workers.config import DeviceName


def asked_device(setting: str) -> DeviceName | None:
    """The device that the setting names; None for `auto`, which takes the cluster to tell."""
    if setting == "auto":
        return None
    return "cuda" if setting == "cuda" else "cpu"


def choose_device(setting: str) -> DeviceName:
    """The device of the setting; for `auto`, GPUs if the cluster that this process has joined has any."""
    asked = asked_device(setting)
    if asked is not None:
        return asked
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return "cuda" if resources.get("GPU", 0) >= 1 else "cpu"
