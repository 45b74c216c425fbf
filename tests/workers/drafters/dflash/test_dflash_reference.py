"""DFlash in a live engine against the spec's formulas: every logit of every round, whatever was accepted.

What is verified comes from a script, so that rounds of every acceptance follow each other; what the drafter itself
proposed is compared with a reference that starts from scratch in each round. Around it, every key that must not be
read is NaN (see `WatchedDrafter`).
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gemray_workers.config import DFlashCausalName
from gemray_workers.messages import Submit
from support.checkpoints.tiny import SHAPES, Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import DFLASH_WINDOW, tiny_dflash
from support.engine.engine_runner import Run
from support.engine.scripted_drafters import Texts, plain_texts
from support.engine.speculation_rig import Rig, solo_rig
from support.engine.watched_drafter import Faulty, OtherTables, WatchedDrafter, WatchedRound
from support.engine.watched_requests import every_acceptance, greedy_requests, plain_greedy_texts
from support.oracles.dflash_reference import DFlashReference
from support.oracles.mtp_reference import target_states
from support.oracles.oracle import solo_model
from support.oracles.paged import PagedCache, Rows

BLOCK = 16
PROMPT_LENGTHS = (1, 5, DFLASH_WINDOW - 1, DFLASH_WINDOW, DFLASH_WINDOW + 1, 2 * DFLASH_WINDOW + 1, 40)


NUM_DRAFTS = (15, 1, 4, 7, 15, 11, 0)
"""Blocks of 2 to 16 rows, and a request without."""


def watched_requests() -> list[Submit]:
    """Prompts around the drafter's window and its double."""
    return greedy_requests(PROMPT_LENGTHS, NUM_DRAFTS)


def texts_of(shape: Shape) -> Texts:
    return plain_greedy_texts(shape, PROMPT_LENGTHS, NUM_DRAFTS)


@functools.cache
def features_of(shape: Shape, request_id: str) -> Tensor:
    """Outputs of every target layer [C, L, H] over a request's text, in float64 and one pass."""
    model = solo_model(tiny_checkpoint(shape))
    text = texts_of(shape)[request_id]
    cache = PagedCache(model.config, num_sequences=1, max_len=len(text), dtype=model.dtype)
    layers = tuple(range(model.config.num_layers))
    captured = model.forward(cache.batch([Rows(0, text, 0)]), cache.caches, capture=layers).captured_TFH
    assert captured is not None
    return captured


def reference_of(shape: Shape, drafter_path: Path | None = None, **settings: Any) -> DFlashReference:
    directory = tiny_checkpoint(shape)
    drafter_path = drafter_path or tiny_dflash(directory, block_size=BLOCK)
    table_VH = solo_model(directory).embedding.table_VH
    ids = solo_model(directory).shard.global_ids()
    rows = ids.argsort(stable=True)[(ids < 0).sum() :]
    return DFlashReference(drafter_path, table_VH[rows], **settings)


def expected_logits(shape: Shape, reference: DFlashReference, watched: WatchedRound) -> Tensor:
    """From scratch: context of all committed positions, then one block."""
    features = features_of(shape, watched.request_id)[: watched.start, reference.layer_ids]
    newest = texts_of(shape)[watched.request_id][watched.start]
    return reference.logits(reference.context(features), newest, len(watched.drafts))


def worst_difference(shape: Shape, reference: DFlashReference, rounds: list[WatchedRound]) -> float:
    """Over all rounds and logits; a NaN is as bad as can be."""
    differences = [(w.logits_KV - expected_logits(shape, reference, w)).abs().max().item() for w in rounds]
    return max(torch.inf if math.isnan(d) else d for d in differences)


@dataclass(frozen=True)
class Watched:
    run: Run
    drafter: WatchedDrafter


def watch(shape: Shape, rig: Rig, *, inner: Any = None, prefix_cache: bool = False, **limits: Any) -> Watched:
    """While a prefix cache keeps pages that left a window, all groups hold the same page numbers, and one group's table
    would do for another's."""
    drafter = WatchedDrafter(rig, every_acceptance(texts_of(shape)), inner)
    run = rig.run(watched_requests(), drafter=drafter.outer, prefix_cache=prefix_cache, **limits)
    return Watched(run, drafter)


def dflash_rig(shape: Shape) -> Rig:
    directory = tiny_checkpoint(shape)
    return solo_rig(directory, drafter_path=tiny_dflash(directory, block_size=BLOCK))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "situation", [{}, {"prefill_chunk": 5, "prefix_cache": True}, {"prefill_chunk": 8, "num_slots": 4}]
)
def test_every_round_equals_the_reference_from_scratch(shape: Shape, situation: dict[str, Any]) -> None:
    watched = watch(shape, dflash_rig(shape), **situation)
    texts = texts_of(shape)
    assert plain_texts(watched_requests(), watched.run.ids) == texts
    rounds, reference = watched.drafter.rounds, reference_of(shape)
    assert len({w.start for w in rounds}) > 20
    assert {r.num_accepted for r in watched.drafter.scripted_rounds} >= {0, 1, 2, 3, 4, 7}
    assert worst_difference(shape, reference, rounds) < 1e-9
    for w in rounds:
        assert w.drafts == w.logits_KV.argmax(-1).tolist()


def test_the_context_is_exactly_the_committed_positions() -> None:
    """Whatever came before (all rejected, all accepted, chunks), the keys are those of a fresh prefill."""
    watched = watch("31B", dflash_rig("31B"), prefill_chunk=5)
    reference = reference_of("31B")
    kinds = [f"dflash.{kind.removesuffix('_attention')}" for kind in reference.config["layer_types"]]
    assert len(watched.drafter.committed_keys) > 50
    for request_id, committed, keys in watched.drafter.committed_keys:
        text_len = len(texts_of("31B")[request_id])
        context = reference.context(features_of("31B", request_id)[:committed, reference.layer_ids])
        for group, found in keys.items():
            # The last step may commit what lies behind the text's end, which no reference has.
            expected = context.keys[kinds.index(group)][-len(found) :]
            if committed <= text_len:
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_the_reference_from_scratch_equals_itself_grown_round_by_round() -> None:
    reference = reference_of("12B")
    features = features_of("12B", "r6")[:, reference.layer_ids]
    grown = reference.context(features[:7])
    for start, end in ((7, 8), (8, 13), (13, 40), (40, 41)):
        grown = grown.append(reference.context(features[start:end], start))
        fresh = reference.context(features[:end])
        assert grown.length == fresh.length == end
        torch.testing.assert_close(reference.logits(grown, 9, 5), reference.logits(fresh, 9, 5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_features_are_the_hidden_states_one_index_on(shape: Shape) -> None:
    """transformers' ``hidden_states[t + 1]`` in the reference, instead of the engine's own target."""
    watched = watch(shape, dflash_rig(shape))
    reference = reference_of(shape)
    last = {w.request_id: w for w in watched.drafter.rounds}
    for w in last.values():
        states = target_states(tiny_checkpoint(shape), texts_of(shape)[w.request_id][: w.start])
        for shift, is_right in ((0, True), (-1, False)):
            layers = [t + shift for t in reference.layer_ids]
            features = states.layers_LCH[layers].transpose(0, 1)
            newest = texts_of(shape)[w.request_id][w.start]
            expected = reference.logits(reference.context(features), newest, len(w.drafts))
            assert ((w.logits_KV - expected).abs().max().item() < 1e-3) == is_right


@pytest.mark.parametrize("settings", [{"input_scale": 1.0}, {"is_causal": True}, {"is_causal": False}])
def test_settings_of_the_arithmetic(settings: dict[str, Any]) -> None:
    """Each setting of the engine equals the same one of the reference, and differs from the default."""
    shape: Shape = "E4B"
    directory = tiny_checkpoint(shape)
    drafter_path = tiny_dflash(directory, block_size=BLOCK)
    if "is_causal" in settings:
        drafter_path = edited_checkpoint(drafter_path, is_causal=settings["is_causal"])
        rig = solo_rig(directory, drafter_path=drafter_path)
    else:
        scale = settings["input_scale"]
        rig = Rig(solo_model(directory), directory, drafter_path=drafter_path, dflash_input_scale=scale)
    rounds = watch(shape, rig).drafter.rounds
    assert worst_difference(shape, reference_of(shape, **settings), rounds) < 1e-9
    assert worst_difference(shape, reference_of(shape), rounds) > 1e-3


@pytest.mark.parametrize(
    ("choice", "expected", "is_causal"),
    [
        ("config", (True, True, False), None),
        ("sliding", (True, True, False), None),
        ("all", (True, True, True), True),
        ("none", (False, False, False), False),
    ],
)
def test_the_causal_setting(choice: DFlashCausalName, expected: tuple[bool, ...], is_causal: bool | None) -> None:
    """It holds of every layer, and in every logit; a choice goes before what the checkpoint says."""
    directory = tiny_checkpoint("E4B")
    drafter_path = tiny_dflash(directory, block_size=BLOCK)
    if choice != "config":
        drafter_path = edited_checkpoint(drafter_path, is_causal=choice == "none")
    rig: Any = Rig(solo_model(directory), directory, drafter_path=drafter_path, dflash_causal=choice)
    assert tuple(layer._causal for layer in rig.drafter._model._layers) == expected
    assert rig.plan.needs[0].causal == all(expected)
    rounds = watch("E4B", rig).drafter.rounds
    assert worst_difference("E4B", reference_of("E4B", is_causal=is_causal), rounds) < 1e-9


def test_the_output_multiplier() -> None:
    directory = tiny_checkpoint("E4B")
    drafter_path = edited_checkpoint(tiny_dflash(directory, block_size=BLOCK), output_multiplier=0.5)
    rounds = watch("E4B", Rig(solo_model(directory), directory, drafter_path=drafter_path)).drafter.rounds
    assert worst_difference("E4B", reference_of("E4B", drafter_path), rounds) < 1e-9
    assert worst_difference("E4B", reference_of("E4B"), rounds) > 1e-3


def test_tensor_names_of_other_exporters() -> None:
    """The same drafter under the names of spec 0.4."""
    directory = tiny_checkpoint("E4B")
    drafter_path = edited_checkpoint(tiny_dflash(directory, block_size=BLOCK))
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    file = drafter_path / "model.safetensors"
    tensors = {names.get(name, name): tensor for name, tensor in load_file(file).items()}
    assert tensors.keys() >= set(names.values())
    save_file(tensors, file)
    rounds = watch("E4B", Rig(solo_model(directory), directory, drafter_path=drafter_path)).drafter.rounds
    assert worst_difference("E4B", reference_of("E4B"), rounds) < 1e-9


def edited_checkpoint(directory: Path, **changes: Any) -> Path:
    copy = Path(tempfile.mkdtemp(prefix="tiny-dflash-edited-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    shutil.copytree(directory, copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


def swapped_tables(rig: Rig) -> Faulty:
    instead = {"dflash.sliding": "dflash.full", "dflash.full": "dflash.sliding"}
    return Faulty(rig.drafter, slots=lambda slots: OtherTables(slots, instead))


def last_row_forgotten(rig: Rig) -> Faulty:
    return Faulty(rig.drafter, num_accepted=lambda _rows, accepted_A: (accepted_A - 1).clamp(min=0))


@pytest.mark.parametrize("fault", [swapped_tables, last_row_forgotten])
def test_a_drafter_with_a_fault_is_caught(fault: Callable[[Rig], Faulty]) -> None:
    rig = dflash_rig("E2B")
    watched = watch("E2B", rig, inner=fault(rig))
    assert plain_texts(watched_requests(), watched.run.ids) == texts_of("E2B"), "no fault of a drafter changes ids"
    assert worst_difference("E2B", reference_of("E2B"), watched.drafter.rounds) > 1e-3


def test_features_of_the_next_layer_are_caught() -> None:
    rig = dflash_rig("E2B")
    shifted = tuple(layer + 1 for layer in rig.plan.traits.captured_layers)
    watched = watch("E2B", rig, captured_layers=shifted)
    assert worst_difference("E2B", reference_of("E2B"), watched.drafter.rounds) > 1e-3


@pytest.mark.parametrize("wrong", [{"causal": False}, {"causal": True}, {"more": 1}, {"more": -1}])
def test_a_wrong_mask_is_caught(wrong: dict[str, Any]) -> None:
    """Every layer causal or none, and windows of one key more or less."""
    rig: Any = Rig(
        solo_model(tiny_checkpoint("E2B")),
        tiny_checkpoint("E2B"),
        drafter_path=tiny_dflash(tiny_checkpoint("E2B"), block_size=BLOCK),
    )
    for layer in rig.drafter._model._layers:
        kernel = layer._kernel

        def wrong_kernel(
            *args: Any, window: int | None, causal: bool, kernel: Any = kernel, **others: float | int | None
        ) -> Tensor:
            window = None if window is None else window + wrong.get("more", 0)
            masked: Tensor = kernel(*args, window=window, causal=wrong.get("causal", causal), **others)
            return masked

        layer._kernel = wrong_kernel
    watched = watch("E2B", rig)
    assert worst_difference("E2B", reference_of("E2B"), watched.drafter.rounds) > 1e-3
