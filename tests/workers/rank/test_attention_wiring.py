"""Settings and drafters reach the choice of attention backends: what a blueprint chooses, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemray_workers.attention import choice
from gemray_workers.attention.choice import BACKENDS, TORCH, TRITON
from gemray_workers.errors import InvalidField
from gemray_workers.rank.blueprint import Blueprint
from support.checkpoints.tiny import tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import engine_config

TARGET = tiny_checkpoint("31B")
ASSISTANT, DFLASH = tiny_assistant(TARGET), tiny_dflash(TARGET)


def blueprint(drafter: Path | None, **settings: Any) -> Blueprint:
    """Drawn for a card, in a dtype of Triton's; nothing is put on it."""
    fields = {"device": "cuda", "dtype": "float32", **settings}
    return Blueprint.of(engine_config(TARGET, drafter_path=None if drafter is None else str(drafter), **fields))


def chosen(drafter: Path | None, **settings: Any) -> list[tuple[str, str]]:
    return [(c.what.split()[0], c.chosen) for c in blueprint(drafter, **settings).choices]


@pytest.mark.parametrize(
    ("drafter", "settings", "expected"),
    [
        (None, {}, [("target", "triton")]),
        (None, {"attention_backend": "torch"}, [("target", "torch")]),
        (ASSISTANT, {"attention_backend": "torch"}, [("target", "torch"), ("drafter", "torch")]),
        (ASSISTANT, {}, [("target", "triton"), ("drafter", "triton")]),
        (DFLASH, {"attention_backend": "torch"}, [("target", "torch"), ("drafter", "triton")]),
        (DFLASH, {"drafter_attention_backend": "torch"}, [("target", "triton"), ("drafter", "torch")]),
        (
            DFLASH,
            {"attention_backend": "torch", "drafter_attention_backend": "torch", "drafter_placement": "dedicated"},
            [("target", "torch"), ("drafter", "torch")],
        ),
    ],
)
def test_what_is_chosen(drafter: Path | None, settings: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert chosen(drafter, **settings) == expected


def test_clients_are_told_every_choice() -> None:
    """Why, too: a drafter in the target's cache has no choice of its own."""
    found = blueprint(ASSISTANT)
    assert tuple(found.model_info().choices)[: len(found.choices)] == found.choices
    assert [c.reason for c in found.choices] == [
        "the first that can serve it",
        "inherited: the drafter reads the target's KV cache",
    ]


def test_a_drafter_in_the_targets_cache_cannot_leave_its_backend() -> None:
    with pytest.raises(InvalidField, match=r"drafter_attention_backend = 'torch' .* triton: the mtp drafter reads"):
        blueprint(ASSISTANT, drafter_attention_backend="torch")


@pytest.mark.parametrize(("causal", "expected"), [("config", "torch"), ("none", "torch"), ("all", "triton")])
def test_a_dflash_block_needs_non_causal_attention_unless_every_layer_is_causal(
    causal: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Triton without it: the target, which is causal, has it still."""
    backends = (replace(TRITON, non_causal=False), TORCH)
    assert len(backends) == len(BACKENDS)
    for function in (choice.choose_target_backend, choice.choose_drafter_backend):
        monkeypatch.setattr(function, "__defaults__", (backends,))
    assert chosen(DFLASH, dflash_causal=causal) == [("target", "triton"), ("drafter", expected)]


@pytest.mark.parametrize(
    ("drafter", "settings", "reasons"),
    [
        (
            DFLASH,
            {"attention_backend": "flash9", "drafter_attention_backend": "triton", "dtype": "float64"},
            ["attention_backend = 'flash9'", "drafter_attention_backend = 'triton'", "bfloat16, float32, not float64"],
        ),
        (
            DFLASH,
            {"attention_backend": "triton", "drafter_attention_backend": "flash9", "device": "cpu"},
            ["attention_backend = 'triton'", "triton runs on cuda, not on cpu", "drafter_attention_backend = 'flash9'"],
        ),
        (
            ASSISTANT,
            {"attention_backend": "triton", "drafter_attention_backend": "torch", "device": "cpu"},
            ["triton runs on cuda, not on cpu", "drafter_attention_backend = 'torch'", "the mtp drafter reads"],
        ),
    ],
)
def test_impossible_choices_of_target_and_drafter_are_both_told(
    drafter: Path, settings: dict[str, Any], reasons: list[str]
) -> None:
    with pytest.raises(InvalidField) as raised:
        blueprint(drafter, **settings)
    assert raised.value.field == "attention_backend"
    for reason in reasons:
        assert reason in str(raised.value)


@pytest.mark.parametrize("drafter", [DFLASH, ASSISTANT])
def test_a_possible_drafter_is_not_blamed_for_an_impossible_target(drafter: Path) -> None:
    with pytest.raises(InvalidField, match="triton runs on cuda") as raised:
        blueprint(drafter, attention_backend="triton", device="cpu")
    assert "drafter" not in str(raised.value)
