"""What tells the checkpoint of a drafter from that of a model (spec sections 0.2 and 5.8)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemray_workers.errors import InvalidField, Summary

MTP_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
DFLASH_ARCHITECTURE = "DFlashDraftModel"


def refuse_drafter(directory: Path, raw: Mapping[str, Any]) -> None:
    """Refuse a drafter where a model is wanted; `raw` is the config.json of `directory`.

    Raises:
        InvalidField: the drafter's kind, what tells it, and which setting takes it.
    """
    architectures = raw.get("architectures")
    if raw.get("model_type") in MTP_MODEL_TYPES:
        kind = "an MTP assistant"
    elif isinstance(architectures, list) and DFLASH_ARCHITECTURE in architectures:
        kind = "a DFlash drafter"
    else:
        return
    found = Summary(f"{directory} (model_type {raw.get('model_type')}, architectures {architectures})")
    allowed = f"a Gemma 4 model: this is {kind}, which drafts for a target; --drafter takes it"
    raise InvalidField("model", found, allowed)
