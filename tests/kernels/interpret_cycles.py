"""Run by `test_triton_cycles` in a process of its own: engines with Triton's kernels beside the products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from gemray_kernels.table import REFERENCE, triton_kernels, triton_row_kernels
from gemray_workers.execution import slots
from gemray_workers.model import weight_sharding
from gemray_workers.parallel.communicator import SoloCommunicator
from support.checkpoints.tiny import Shape, tiny_checkpoint
from support.checkpoints.tiny_drafters import tiny_assistant, tiny_dflash
from support.engine.engine_runner import Run, engine_config, request, run_engine
from support.kernels.quick_interpreter import patch_language_once

DRAFTERS: dict[str, Callable[[Path], Path] | None] = {"none": None, "mtp": tiny_assistant, "dflash": tiny_dflash}
BESIDE_PRODUCTS = (
    "rms_norm",
    "rms_norm_then_scale",
    "embed",
    "per_layer_inputs",
    "rope_tables",
    "attention_inputs",
    "add_then_norms",
    "add_experts_then_norms",
    "route",
)
CASES: tuple[tuple[Shape, str], ...] = (("31B", "mtp"), ("31B", "dflash"), ("26B-A4B", "none"), ("E4B", "none"))


def ids_of(shape: Shape, method: str) -> dict[str, list[int]]:
    """Tokens of two requests, one of which samples, of other lengths."""
    directory = tiny_checkpoint(shape)
    make = DRAFTERS[method]
    drafter = {} if make is None else {"drafter_path": str(make(directory)), "num_draft_tokens": 2}
    config = engine_config(directory, max_num_seqs=4, dtype="float32", **drafter)
    sampled = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "suppress_tokens": (5, 9)}
    submits = [request("a", [5, 6], 2, seed=1, **sampled), request("b", [6, 6, 7], 3)]
    return cast(Run, run_engine(SoloCommunicator(), config, submits)).ids


def main() -> None:
    """Print a line a case: whether the ids are those of the references."""
    fast = triton_kernels()
    kernels = replace(REFERENCE, **{name: getattr(fast, name) for name in BESIDE_PRODUCTS})
    for shape, method in CASES:
        expected = ids_of(shape, method)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weight_sharding, "kernels_for", lambda *_: kernels)
            patch.setattr(slots, "row_kernels_for", lambda _: triton_row_kernels())
            found = ids_of(shape, method)
        print(shape, method, "equal" if found == expected else f"{found} is not {expected}")


if __name__ == "__main__":
    patch_language_once()
    torch.set_num_threads(1)
    main()
