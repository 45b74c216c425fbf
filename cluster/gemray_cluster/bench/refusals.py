"""What a benchmark refuses before it starts a process, in the names of its settings."""

from __future__ import annotations

import torch

from gemray_cluster.bench.settings import Setup
from gemray_cluster.settings.settings import ENGINE_NAMES
from gemray_workers.errors import InvalidField

_NAMES = {**ENGINE_NAMES, "max_model_len": "prompt_len, steps or prefill"}
"""Fields of EngineConfig that setups call something else, or that follow from others."""


def require_cards(setup: Setup) -> None:
    """Refuse a setup that wants cards which this machine does not have; raises InvalidField."""
    if setup.device != "cuda":
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise InvalidField("device", setup.device, "cpu: torch finds no CUDA device here")
    if setup.gang_size > found:
        of_its_own = " and the drafter on another" if setup.gang_size > setup.tp else ""
        raise InvalidField("tp", setup.tp, f"as many as there are cards, {found}: each rank is on one{of_its_own}")


def in_settings_names(error: InvalidField) -> InvalidField:
    """The same error with the name that a setup has for an engine's field."""
    return InvalidField(_NAMES.get(error.field, error.field), error.value, error.allowed)
