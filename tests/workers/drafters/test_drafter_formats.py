"""Drafters of other formats are refused by the format's name and the reason, however the config tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemray_workers.drafters.formats import UNSERVED_FORMATS
from gemray_workers.drafters.plan import plan_drafter
from gemray_workers.errors import InvalidField
from gemray_workers.model.config import ModelConfig
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import edited_drafter, tiny_dflash
from support.engine.engine_runner import engine_config

TARGET = tiny_checkpoint("31B")
MODEL = ModelConfig.from_directory(TARGET)

REASONS = {
    "DFlash2": "convolution and selector heads",
    "DSpark": "Markov and confidence heads",
    "P-EAGLE": "several tokens in parallel from EAGLE's features",
    "EAGLE-3": "autoregressive decoder over fused target layers",
    "EAGLE": "autoregressive decoder over the target's last hidden state",
    "Medusa": "heads on the target's hidden state",
    "MLPSpeculator": "chain of MLP heads",
    "speculators DFlash": "a vocabulary and an lm_head of its own",
    "speculators": "layout gemray does not read",
}


def plan(directory: Path) -> Any:
    return plan_drafter(engine_config(TARGET, drafter_path=str(directory)), MODEL)


def algorithm(name: str) -> dict[str, Any]:
    """A drafter that looks like DFlash but for what the speculators library notes beside it."""
    return {"speculators_config": {"algorithm": name, "verifier": {"name_or_path": "google/gemma-4-31B-it"}}}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("DFlash2", {"architectures": ["DFlash2DraftModel"]}),
        ("DFlash2", {"conv_kernel_size": 3}),
        ("DFlash2", {"selector_hidden_size": 64}),
        ("DFlash2", {"selector_dim": 64}),
        ("DFlash2", {"selector_num_heads": 4}),
        ("DFlash2", {"use_selector": True}),
        ("DFlash2", {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 3, 4], "selector_dim": 64}}),
        ("DSpark", {"architectures": ["DSparkDraftModel"]}),
        ("DSpark", {"model_type": "dspark"}),
        ("DSpark", {"markov_rank": 64}),
        ("DSpark", {"markov_head": True}),
        ("DSpark", {"markov_order": 2}),
        ("DSpark", {"confidence_head": {"hidden_size": 64}}),
        ("DSpark", {"use_confidence_head": True}),
        ("DSpark", {"confidence_hidden_size": 64}),
        ("P-EAGLE", {"architectures": ["PEagleDraftModel"]}),
        ("P-EAGLE", algorithm("peagle")),
        ("P-EAGLE", algorithm("p-eagle")),
        ("EAGLE-3", {"architectures": ["Eagle3Speculator"]}),
        ("EAGLE-3", {"architectures": ["LlamaForCausalLMEagle3"]}),
        ("EAGLE-3", algorithm("eagle3")),
        ("EAGLE-3", {"speculators_model_type": "eagle3"}),
        ("EAGLE", {"architectures": ["EagleSpeculator"]}),
        ("EAGLE", {"architectures": ["EagleLlamaForCausalLM"]}),
        ("EAGLE", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}),
        ("EAGLE", algorithm("eagle")),
        ("Medusa", {"architectures": ["MedusaModel"]}),
        ("Medusa", {"model_type": "medusa"}),
        ("Medusa", {"medusa_num_heads": 4}),
        ("MLPSpeculator", {"architectures": ["MLPSpeculatorPreTrainedModel"]}),
        ("MLPSpeculator", {"model_type": "mlp_speculator"}),
        ("speculators DFlash", {"architectures": ["DFlashSpeculator"]}),
        ("speculators DFlash", {"draft_vocab_size": 32000}),
        ("speculators DFlash", {"aux_hidden_state_layer_ids": [1, 17]}),
        ("speculators DFlash", {"speculators_model_type": "dflash"}),
        ("speculators DFlash", algorithm("dflash")),
        ("speculators", {"architectures": ["SomeSpeculator"]}),
        ("speculators", algorithm("something_new")),
        ("speculators", {"transformer_layer_config": {"hidden_size": 64}}),
    ],
)
def test_another_format_is_refused_by_name_and_reason(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as refused:
        plan(edited_drafter(tiny_dflash(TARGET), tmp_path / "d", **changes))
    assert f"the format {name}, " in refused.value.allowed
    assert REASONS[name] in refused.value.allowed
    assert "MTP assistant" in refused.value.allowed
    assert "DFlash drafter (DFlashDraftModel)" in refused.value.allowed


def test_every_format_has_a_case() -> None:
    assert [unserved.name for unserved in UNSERVED_FORMATS] == list(REASONS)


@pytest.mark.parametrize(
    "changes",
    [
        {"markov_order": 0, "use_confidence_head": False, "selector_dim": None},
        {"transformers_version": "5.7.0", "confidential": True, "conversion": "none", "num_draft_tokens": 15},
    ],
)
def test_what_is_off_or_only_sounds_alike_is_no_other_format(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert plan(edited_drafter(tiny_dflash(TARGET), tmp_path / "d", **changes)).traits.method == "dflash"


def test_architectures_that_are_no_names(tmp_path: Path) -> None:
    for number, value in enumerate(("DFlashDraftModel", 5, [5], {"a": 1})):
        with pytest.raises(InvalidField, match=r"drafter architectures = .*a list of names"):
            plan(edited_drafter(tiny_dflash(TARGET), tmp_path / str(number), architectures=value))
