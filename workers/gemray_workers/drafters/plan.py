"""Which drafter a gang gets: decided from `--method` and the drafter's config, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gemray_workers.checkpoint.json_file import read_json_object
from gemray_workers.config import EngineConfig
from gemray_workers.drafters.dflash.plan import DFlashPlan
from gemray_workers.drafters.formats import served_format
from gemray_workers.drafters.mtp.plan import MTPPlan
from gemray_workers.drafters.protocol import DrafterPlan, NoDrafter
from gemray_workers.drafters.tokenizer_match import check_same_tokenizer
from gemray_workers.errors import InvalidField
from gemray_workers.model.config import ModelConfig

_PLANS: dict[str, Callable[[str, EngineConfig, ModelConfig], DrafterPlan]] = {"mtp": MTPPlan, "dflash": DFlashPlan}


def plan_drafter(config: EngineConfig, target: ModelConfig) -> DrafterPlan:
    """The drafter that the settings ask for, checked against the target.

    Raises:
        InvalidField: the method does not fit the drafter's directory, or the drafter not the target.
        CheckpointError: the drafter's directory cannot be read.
    """
    if config.drafter_path is None:
        if config.method in _PLANS:
            raise InvalidField("drafter", None, f"the directory of a {config.method} drafter")
        return NoDrafter()
    if config.method == "none":
        return NoDrafter()
    directory = Path(config.drafter_path)
    found = served_format(read_json_object(directory / "config.json"), directory)
    if config.method not in ("auto", found):
        raise InvalidField("method", config.method, f"auto or {found}: {config.drafter_path} holds a {found} drafter")
    check_same_tokenizer(Path(config.model_path), directory)
    return _PLANS[found](config.drafter_path, config, target)
