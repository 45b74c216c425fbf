"""Drafters whose own layers are quantized: they draft what their plain twins with the decompressed weights draft."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gemray_workers.errors import CheckpointError, InvalidField
from gemray_workers.messages import Submit
from gemray_workers.parallel.communicator import Communicator
from support.checkpoints.quantized import FormatName, quantized_checkpoint
from support.checkpoints.tiny import VOCAB_SIZE, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import Run, request
from support.engine.scripted_drafters import plain_texts, randomly_right
from support.engine.speculation_rig import Rig, gang_rig, solo_rig
from support.engine.watched_drafter import WatchedDrafter, WatchedRound
from support.oracles.oracle import solo_model
from support.processes.gang import RunOnGang

TARGET = tiny_checkpoint("31B")
MAKERS: dict[str, Callable[[], Path]] = {
    "mtp": lambda: tiny_assistant(TARGET),
    "mtp, centroids": lambda: tiny_assistant(TARGET, centroids=True),
    "dflash": lambda: tiny_dflash(TARGET),
    "dflash, model.": lambda: tiny_dflash(TARGET, prefix="model."),
}
FORMATS: tuple[FormatName, ...] = ("nvfp4", "fp8-block", "modelopt-nvfp4", "int8-channel")


def submits() -> list[Submit]:
    return [request(f"r{i}", prompt, 14) for i, prompt in enumerate(([5, 6, 7], list(range(20, 41)), [9] * 11))]


@functools.cache
def rounds(drafter_path: Path) -> tuple[list[WatchedRound], Run]:
    """What a drafter scores while random ones of its drafts are verified as right."""
    plain = solo_rig(TARGET).run(submits())
    rig = Rig(solo_model(TARGET, torch.float64), TARGET, drafter_path=drafter_path)
    drafter = WatchedDrafter(rig, randomly_right(plain_texts(submits(), plain.ids), VOCAB_SIZE))
    run = rig.run(submits(), drafter=drafter.outer, prefix_cache=False)
    assert run.ids == plain.ids
    return drafter.rounds, run


@pytest.mark.parametrize(("kind", "name"), list(zip(MAKERS, FORMATS, strict=True)))
def test_drafts_are_those_of_the_plain_twin(kind: str, name: FormatName) -> None:
    packed, plain = quantized_checkpoint(MAKERS[kind](), lambda _layer: name)
    found, _ = rounds(packed)
    expected, _ = rounds(plain)
    original, _ = rounds(MAKERS[kind]())
    assert len(found) == len(expected) > 10
    for one, two, before in zip(found, expected, original, strict=True):
        assert (one.request_id, one.start, one.drafts) == (two.request_id, two.start, two.drafts)
        scored = two.logits_KV.isfinite()
        assert torch.equal(one.logits_KV.isfinite(), scored)
        torch.testing.assert_close(one.logits_KV[scored], two.logits_KV[scored], rtol=0, atol=1e-5)
        assert (one.logits_KV - before.logits_KV)[scored].abs().max() > 1e-3, "quantizing changed nothing"


def ids_on_rank(comm: Communicator, paths: list[Path]) -> list[Run | None]:
    """Ids with each drafter, on the ranks of a gang."""
    rigs = [gang_rig(comm, TARGET, drafter_path=path) for path in paths]
    if comm.rank == 0:
        return [rig.run(submits()) for rig in rigs]
    for rig in rigs:
        rig.engine(None).run()
    return []


def test_ids_are_the_plain_ones_on_every_rank(run_on_gang: RunOnGang) -> None:
    """On 2 ranks heads and inputs of 24 numbers cut blocks of 16."""
    packed = [quantized_checkpoint(MAKERS[kind](), lambda _layer: "nvfp4")[0] for kind in ("mtp", "dflash")]
    lead, *_ = run_on_gang(2, ids_on_rank, packed)
    plain = solo_rig(TARGET).run(submits())
    for run in lead:
        assert run is not None
        assert run.speculation.drafted > 0
        assert run.ids == plain.ids


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    packed, _ = quantized_checkpoint(MAKERS["dflash"](), lambda _layer: "fp8-channel")
    tensors = load_file(packed / "model.safetensors")
    del tensors["fc.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"missing tensors: fc\.weight_scale"):
        rounds(tmp_path)


def test_a_format_that_is_not_computed_names_the_drafter(tmp_path: Path) -> None:
    packed, _ = quantized_checkpoint(MAKERS["mtp"](), lambda _layer: "int8-channel")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((packed / "model.safetensors").read_bytes())
    with pytest.raises(InvalidField, match=f"quant_method in {tmp_path}"):
        rounds(tmp_path)
