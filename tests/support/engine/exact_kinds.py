"""What is served in exact numerics on cards, and the requests and ways that are drawn for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gemray_workers.config import EngineConfig, KVDTypeName
from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.messages import Submit
from gemray_workers.sampling.params import DraftMethod
from support.engine.exact_runs import Got, Way, draw_ways, mixed_requests
from support.engine.gpu import shortened


@dataclass(frozen=True)
class Kind:
    """What is served."""

    model: str
    drafters: tuple[str, ...]
    kv_dtype: KVDTypeName = "auto"

    @property
    def is_embedded(self) -> bool:
        """Whether its weights are trained ones."""
        return self.model == "gemray-tiny"


KINDS = {
    "gemray-tiny": Kind("gemray-tiny", ("gemray-tiny-assistant", "gemray-tiny-dflash")),
    "gemray-tiny, centroids": Kind("gemray-tiny", ("gemray-tiny-assistant-centroid",)),
    "31B": Kind("31B-it", ("31B-it-assistant", "31B-it-DFlash")),
    "26B-A4B": Kind("26B-A4B-it", ("26B-A4B-it-assistant", "26B-A4B-it-DFlash")),
    "E4B": Kind("E4B-it", ("E4B-it-assistant",)),
    "31B, 8-bit KV": Kind("31B-it", ("31B-it-assistant",), "fp8_e4m3"),
    "31B, W4A16": Kind("31B-it-w4a16", ("31B-it-assistant", "31B-it-DFlash")),
    "31B, FP8": Kind("31B-it-fp8", ("31B-it-assistant",)),
    "31B, NVFP4": Kind("31B-it-nvfp4", ("31B-it-assistant",)),
    "26B-A4B, W8A16": Kind("26B-A4B-it-w8a16", ("26B-A4B-it-assistant",)),
    "E4B, W4A16": Kind("E4B-it-w4a16", ("E4B-it-assistant",)),
}
NUM_LAYERS = 8
"""Layers of the shapes that share no KV: a period of sliding layers and a full one, and some more."""
NUM_CASES, NUM_CASES_OF_TWO = 150, 100
"""Requests served on one card at least, and on two."""
LONGEST, MAX_TOKENS = 1300, 24
"""The longest prompt is longer than any window; an output always goes beyond the pages of its prompt."""


def exact_config(kind: Kind, directory: Path, *, drafters: bool, **changes: Any) -> EngineConfig:
    """A kind in bfloat16 with its drafters or none; graphs are captured as they are wanted."""
    names = [kind.model, *(kind.drafters if drafters else ())]
    if kind.is_embedded:
        model, *paths = (embedded_path(cast(EmbeddedName, name)) for name in names)
    else:
        model, *paths = (shortened(name, directory, NUM_LAYERS) for name in names)
        changes["random_weights"] = True
    settings: dict[str, Any] = {
        "model_path": str(model),
        "drafter_path": str(paths[0]) if paths else None,
        "second_drafter_path": str(paths[1]) if len(paths) > 1 else None,
        "dtype": "bfloat16",
        "device": "cuda",
        "numerics": "exact",
        "kv_dtype": kind.kv_dtype,
        "max_model_len": LONGEST + MAX_TOKENS + 20,
        "max_num_seqs": 32,
        "max_step_tokens": 1024,
        "prefill_chunk": 512,
        "kv_memory_bytes": 1 << 30,
        "capture": "use",
    }
    return EngineConfig(**{**settings, "tensor_parallel_size": 1, **changes})


def exact_requests(kind: Kind) -> list[Submit]:
    """What a kind serves, alone and in every way."""
    vocab_size = 4096 if kind.is_embedded else 200_000
    return mixed_requests(32, vocab_size, longest=LONGEST, max_tokens=MAX_TOKENS)


def exact_ways(
    kind: Kind, submits: Sequence[Submit], alone: Mapping[str, Got], *, tp: int, num_cases: int
) -> list[Way]:
    """How a gang of `tp` ranks serves them: the same ways each time, whatever their ids are."""
    methods: list[DraftMethod] = ["auto", "none", "mtp"]
    if len(kind.drafters) > 1:
        methods.append("dflash")
    return list(draw_ways(tp, submits, alone, num_cases=num_cases, methods=methods, most_drafts=4))
