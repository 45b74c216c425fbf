"""Which drafter a gang gets: decided from `--method` and the drafter's config, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gemray_workers.checkpoint.json_file import read_json_object
from gemray_workers.config import EngineConfig
from gemray_workers.drafters.dflash.plan import DFlashPlan
from gemray_workers.drafters.formats import served_format
from gemray_workers.drafters.mtp.plan import MTPPlan
from gemray_workers.drafters.pair import PairPlan
from gemray_workers.drafters.protocol import DrafterPlan, NoDrafter
from gemray_workers.drafters.tokenizer_match import check_same_tokenizer
from gemray_workers.errors import InvalidField
from gemray_workers.model.config import ModelConfig

_PLANS: dict[str, Callable[[str, EngineConfig, ModelConfig], DrafterPlan]] = {"mtp": MTPPlan, "dflash": DFlashPlan}


def plan_drafter(config: EngineConfig, target: ModelConfig) -> DrafterPlan:
    """The drafter that the settings ask for, or both, checked against the target.

    Raises:
        InvalidField: the method does not fit the drafter's directory, the drafter not the target, or two drafters are
            of one kind.
        CheckpointError: the drafter's directory cannot be read.
    """
    if config.method == "none":
        return NoDrafter()
    found = {path: _format_of(path) for path in config.drafter_paths}
    match config.drafter_paths:
        case ():
            if config.method in _PLANS:
                raise InvalidField("drafter", None, f"the directory of a {config.method} drafter")
            return NoDrafter()
        case (path,):
            if config.method not in ("auto", found[path]):
                allowed = f"auto or {found[path]}: {path} holds a {found[path]} drafter"
                raise InvalidField("method", config.method, allowed)
            return _plan(path, found[path], config, target)
    if set(found.values()) != _PLANS.keys():
        kinds = " and ".join(f"{path} ({found[path]})" for path in config.drafter_paths)
        raise InvalidField("drafter", kinds, "one MTP assistant and one DFlash drafter, or one of them alone")
    if config.method != "auto":
        raise InvalidField(
            "method", config.method, "auto or none with two drafters: a request says which by speculation.method"
        )
    paths = {kind: path for path, kind in found.items()}
    return PairPlan(*(_plan(paths[kind], kind, config, target) for kind in ("mtp", "dflash")))


def _format_of(path: str) -> str:
    return served_format(read_json_object(Path(path) / "config.json"), Path(path))


def _plan(path: str, kind: str, config: EngineConfig, target: ModelConfig) -> DrafterPlan:
    check_same_tokenizer(Path(config.model_path), Path(path))
    return _PLANS[kind](path, config, target)
