"""A config.json that states every field is read as transformers' classes read it, any other is left to them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

import gemray_workers.embedded
from gemray_workers.checkpoint.complete_config import complete
from gemray_workers.checkpoint.hf_config import LAYER_FIELDS, ROOT_FIELDS, TEXT_FIELDS, PlainConfig, plain

PUBLISHED = Path(__file__).resolve().parents[3] / "benchmarks" / "configs"
EMBEDDED = Path(gemray_workers.embedded.__file__).parent
FILES = [file for root in (PUBLISHED, EMBEDDED) for file in sorted(root.glob("*/config.json"))]
CONTENTS: dict[str, dict[str, Any]] = {
    file.parent.name: json.loads(file.read_text()) for file in FILES if "dflash" not in file.parent.name.lower()
}
READ = {
    *ROOT_FIELDS, *TEXT_FIELDS, *LAYER_FIELDS, "text_config", "global_head_dim", "num_global_key_value_heads",
    "sliding_attention", "full_attention", "rope_type", "rope_theta", "partial_rotary_factor",
}  # fmt: skip
"""What other fields hold, such as those of images, decides nothing here; transformers refuses some of it."""
OTHER_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 1.0, 4096, -1, "", "all", "vision", [], [1, 106], {}, ["full_attention"],
    ["sliding_attention"] * 4,
)  # fmt: skip


def by_transformers(content: dict[str, Any]) -> PlainConfig:
    return plain(CONFIG_MAPPING[content["model_type"]].from_dict(copy.deepcopy(content)))


@pytest.mark.parametrize("name", CONTENTS)
def test_published_configs_are_complete(name: str) -> None:
    assert complete(CONTENTS[name]) == by_transformers(CONTENTS[name])


@st.composite
def changed(draw: st.DrawFn) -> dict[str, Any]:
    """A published config with a field left out or of another value, somewhere in it."""
    content = copy.deepcopy(CONTENTS[draw(st.sampled_from(sorted(CONTENTS)))])
    holders = [content]
    if "text_config" in content:
        holders.append(content["text_config"])
    holders.append(holders[-1]["rope_parameters"])
    holders += holders[-1].values()
    holder = draw(st.sampled_from(holders))
    field = draw(st.sampled_from([*sorted(READ & holder.keys()), "per_layer_config", "rope_scaling", "factor"]))
    if draw(st.booleans()):
        holder.pop(field, None)
    else:
        holder[field] = draw(st.sampled_from(OTHER_VALUES))
    return content


@given(changed())
def test_no_reading_differs_from_transformers(content: dict[str, Any]) -> None:
    """What its classes refuse of the fields that are read is left to them, too."""
    if (read := complete(content)) is not None:
        assert read == by_transformers(content)


@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_left_out_is_left_to_transformers(name: str) -> None:
    content = CONTENTS[name]
    text = content.get("text_config", content)
    for field in vars(by_transformers(content).text).keys() - {"per_layer_config"}:
        del (changed := copy.deepcopy(content)).get("text_config", changed)[field]
        assert complete(changed) is None, field
    others: tuple[Any, ...] = ("gemma3", None, [])
    for model_type in others:
        assert complete({**content, "model_type": model_type}) is None
    assert complete({key: value for key, value in content.items() if value is not text}) is None or text is content


@pytest.mark.parametrize("name", [name for name, content in CONTENTS.items() if "text_config" in content])
def test_a_decoders_own_word_on_tied_tables_is_checked_by_transformers(name: str) -> None:
    """That of the root is read; the classes refuse either where it is no switch."""
    content = copy.deepcopy(CONTENTS[name])
    content["text_config"]["tie_word_embeddings"] = None
    assert complete(content) is None
