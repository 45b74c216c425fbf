"""Which drafter a gang gets: decided from `--method` and the drafter's config, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gemray_workers.checkpoint.json_file import read_json_object
from gemray_workers.config import EngineConfig
from gemray_workers.drafters.dflash.config import ARCHITECTURE as DFLASH
from gemray_workers.drafters.dflash.plan import DFlashPlan
from gemray_workers.drafters.mtp.config import MODEL_TYPES as MTP_TYPES
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
    found = _method_of(Path(config.drafter_path))
    if config.method not in ("auto", found):
        raise InvalidField("method", config.method, f"auto or {found}: {config.drafter_path} holds a {found} drafter")
    check_same_tokenizer(Path(config.model_path), Path(config.drafter_path))
    return _PLANS[found](config.drafter_path, config, target)


def _method_of(directory: Path) -> str:
    """What kind of drafter a directory holds, by its config.json."""
    raw = read_json_object(directory / "config.json")
    if raw.get("model_type") in MTP_TYPES:
        return "mtp"
    if any(str(name).startswith("DFlash") or "peculator" in str(name) for name in raw.get("architectures") or []):
        return "dflash"  # which of its formats, and whether it can be computed, is DFlashConfig's to say
    if "dflash_config" in raw or "speculators_config" in raw:
        return "dflash"
    raise InvalidField(
        "drafter",
        f"{directory} (model_type {raw.get('model_type')}, architectures {raw.get('architectures')})",
        f"an MTP assistant ({', '.join(MTP_TYPES)}) or a DFlash drafter ({DFLASH})",
    )
