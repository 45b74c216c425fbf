"""Which format of drafter a config.json describes; formats that are not served are refused by name (spec 5.8)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gemray_workers.checkpoint.drafter_marks import DFLASH_ARCHITECTURE, MTP_MODEL_TYPES
from gemray_workers.errors import InvalidField

SERVED = f"an MTP assistant ({', '.join(MTP_MODEL_TYPES)}) or a DFlash drafter ({DFLASH_ARCHITECTURE})"


@dataclass(frozen=True)
class UnservedFormat:
    """A format of drafter that gemray does not compute."""

    name: str
    reason: str
    """Why not, as a clause that follows the name."""
    marks: tuple[str, ...]
    """Parts of an architecture, model_type or speculators algorithm that name the format, in small letters and
    digits."""
    key_words: tuple[str, ...] = ()
    """Words that only keys of this format contain: such a key with a value identifies it."""


# In the order of asking: a name that holds another (dflash2, peagle) comes before it.
UNSERVED_FORMATS = (
    UnservedFormat(
        "DFlash2",
        "whose convolution and selector heads gemray does not compute",
        marks=("dflash2",),
        key_words=("dflash2", "conv", "selector"),
    ),
    UnservedFormat(
        "DSpark",
        "whose Markov and confidence heads gemray does not compute",
        marks=("dspark",),
        key_words=("dspark", "markov", "confidence"),
    ),
    UnservedFormat(
        "P-EAGLE",
        "whose decoder drafts several tokens in parallel from EAGLE's features, which gemray does not compute",
        marks=("peagle",),
        key_words=("peagle",),
    ),
    UnservedFormat(
        "EAGLE-3",
        "whose autoregressive decoder over fused target layers gemray does not compute",
        marks=("eagle3",),
        key_words=("eagle3",),
    ),
    UnservedFormat(
        "EAGLE",
        "whose autoregressive decoder over the target's last hidden state gemray does not compute",
        marks=("eagle",),
        key_words=("eagle",),
    ),
    UnservedFormat(
        "Medusa",
        "whose heads on the target's hidden state gemray does not compute",
        marks=("medusa",),
        key_words=("medusa",),
    ),
    UnservedFormat(
        "MLPSpeculator",
        "whose chain of MLP heads gemray does not compute",
        marks=("mlpspeculator",),
    ),
    UnservedFormat(
        "speculators DFlash",
        "which has a vocabulary and an lm_head of its own and counts the target's layers otherwise; gemray takes "
        "the original format, which uses the target's",
        marks=("dflashspeculator",),
        key_words=("draft_vocab", "aux_hidden_state"),
    ),
    UnservedFormat(
        "speculators",
        "whose layout gemray does not read",
        marks=("speculator",),
        key_words=("speculators", "transformer_layer"),
    ),
)
_BY_NAME = {unserved.name: unserved for unserved in UNSERVED_FORMATS}


def served_format(raw: Mapping[str, Any], directory: Path) -> Literal["mtp", "dflash"]:
    """The format of the drafter in `directory`, whose config.json is `raw`.

    Raises:
        InvalidField: not a drafter that gemray computes; names what it is, where that is known, and why not.
    """
    if raw.get("model_type") in MTP_MODEL_TYPES:
        return "mtp"
    refuse_unserved(raw)
    if DFLASH_ARCHITECTURE in architectures_of(raw):
        return "dflash"
    found = f"{directory} (model_type {raw.get('model_type')}, architectures {raw.get('architectures')})"
    raise InvalidField("drafter", found, SERVED)


def refuse_unserved(raw: Mapping[str, Any]) -> None:
    """Raise if names or keys of a config.json are those of a format that gemray does not compute.

    Raises:
        InvalidField: names the format, what told it, and why it is not served.
    """
    for field, value, name in _names(raw):
        told = re.sub("[^a-z0-9]", "", name.lower())
        for unserved in UNSERVED_FORMATS:
            if any(mark in told for mark in unserved.marks):
                raise _refusal(field, value, unserved)
    if _algorithm(raw) == "dflash":
        raise _refusal("algorithm", "dflash", _BY_NAME["speculators DFlash"])
    nested = raw.get("dflash_config")
    keys = {**raw, **(nested if isinstance(nested, Mapping) else {})}
    for unserved in UNSERVED_FORMATS:
        for key, value in keys.items():
            # What is off (null, false, 0, nothing) changes nothing that the drafter computes.
            if value and any(f"_{words}_" in f"_{key.lower()}_" for words in unserved.key_words):
                raise _refusal(key, value, unserved)


def architectures_of(raw: Mapping[str, Any]) -> list[str]:
    """The architectures of a drafter's config.json.

    Raises:
        InvalidField: not a list of names.
    """
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidField("drafter architectures", names, "a list of names")
    return names


def _refusal(field: str, value: object, unserved: UnservedFormat) -> InvalidField:
    allowed = f"{SERVED}: this is a drafter of the format {unserved.name}, {unserved.reason}"
    return InvalidField(f"drafter {field}", value, allowed)


def _names(raw: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    """Field, its value and a name in it, wherever a config.json names its format."""
    for name in architectures_of(raw):
        yield "architectures", raw["architectures"], name
    if isinstance(raw.get("model_type"), str):
        yield "model_type", raw["model_type"], raw["model_type"]
    if algorithm := _algorithm(raw):
        yield "algorithm", algorithm, algorithm


def _algorithm(raw: Mapping[str, Any]) -> str | None:
    """What the speculators library calls it: at the top, or inside its own object."""
    own = raw.get("speculators_config")
    inner = own.get("algorithm") if isinstance(own, Mapping) else None
    return next((name for name in (raw.get("speculators_model_type"), inner) if isinstance(name, str)), None)
