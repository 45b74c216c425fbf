"""A few layers of published models, and the programs that a rank of them would launch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gemray_workers.config import EngineConfig, NumericsName
from gemray_workers.execution.cycle_rows import CyclePlan, CycleShape
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.rank.compile_ahead import Rehearsal
from gemray_workers.rank.target_rank import EngineRank
from support.engine.gpu import CONFIGS


def shape_of_few_layers(name: str, directory: Path, plain: Sequence[str] = ()) -> Path:
    """A sliding and a full layer of a published model, and two that share their keys where some do, with a small
    vocabulary; of a quantized one, layers with these names stay plain."""
    config = json.loads((CONFIGS / name / "config.json").read_text())
    if plain:
        config["quantization_config"]["ignore"] += plain
    text = config["text_config"]
    layers = ["sliding_attention", "full_attention"]
    if text.get("num_kv_shared_layers"):
        layers *= 2
        text |= {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 4096}
    text |= {"vocab_size": 4096, "num_hidden_layers": len(layers), "layer_types": layers}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def rehearsal_of(
    name: str, directory: Path, numerics: NumericsName = "exact", max_num_seqs: int = 1, plain: Sequence[str] = ()
) -> Rehearsal:
    config = EngineConfig(
        model_path=str(shape_of_few_layers(name, directory, plain)),
        tensor_parallel_size=1,
        dtype="bfloat16",
        device="cpu",
        numerics=numerics,
        random_weights=True,
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        max_step_tokens=700,
        prefill_chunk=700,
        kv_memory_bytes=1 << 28,
    )
    return EngineRank(config, SoloCommunicator(), torch.device("cpu")).rehearsal()


def programs_of(rehearsal: Rehearsal, plans: list[CyclePlan]) -> set[tuple[str, Any]]:
    return {(program.name, program.arguments[0]) for program in rehearsal.programs(plans)}


def one_used_row() -> list[CycleShape]:
    """Steps of one prompt or several of which one row is used."""
    return [
        CycleShape(
            num_sequences=num_seqs,
            num_choosing=1,
            num_rows=300,
            most_rows=most_rows,
            num_outputs=1,
            most_outputs=1,
            most_keys=most_rows,
        )
        for num_seqs, most_rows in ((1, 300), (2, 200), (5, 60), (8, 60), (12, 60))
    ]
