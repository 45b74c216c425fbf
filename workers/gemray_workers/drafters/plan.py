"""Which drafter a gang gets: decided from `--method` and the drafter's config, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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

_SETTINGS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "mtp": ("MTP assistant", {"mtp_position_delta": 0}),
    "dflash": ("DFlash drafter", {"dflash_input_scale": None, "dflash_causal": "config"}),
}
"""What each kind alone reads, with the values that say nothing."""


def plan_drafter(config: EngineConfig, target: ModelConfig) -> DrafterPlan:
    """The drafter that the settings ask for, or both, checked against the target.

    Raises:
        InvalidField: the method does not fit the drafter's directory, the drafter not the target, two drafters are
            of one kind, or a setting is one of a drafter that is not there.
        CheckpointError: the drafter's directory cannot be read.
    """
    found = {} if config.method == "none" else {path: _format_of(path) for path in config.drafter_paths}
    _refuse_without_effect(config, found.values())
    if config.method == "none":
        return NoDrafter()
    match config.drafter_paths:
        case ():
            if config.method in _PLANS:
                raise InvalidField("method", config.method, "auto or none, as there is no drafter: give one by drafter")
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


def _refuse_without_effect(config: EngineConfig, kinds: Collection[str]) -> None:
    """Refuse settings of drafters that are not there: whoever sets one means it to do something."""
    for kind, (title, defaults) in _SETTINGS.items():
        for name, default in defaults.items():
            value = getattr(config, name)
            if value != default and kind not in kinds:
                raise InvalidField(name, value, f"{'unset' if default is None else default}, as there is no {title}")
    if config.drafter_attention_backend is not None and not kinds:
        raise InvalidField(
            "drafter_attention_backend", config.drafter_attention_backend, "unset, as there is no drafter"
        )


def _format_of(path: str) -> str:
    return served_format(read_json_object(Path(path) / "config.json"), Path(path))


def _plan(path: str, kind: str, config: EngineConfig, target: ModelConfig) -> DrafterPlan:
    check_same_tokenizer(Path(config.model_path), Path(path))
    return _PLANS[kind](path, config, target)
