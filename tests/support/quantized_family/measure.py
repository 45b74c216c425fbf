"""What quantizing does to `gemray-tiny`: nats on held-out prompts, and how many drafts it still accepts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gemray_workers.config import KVDTypeName
from gemray_workers.embedded import EmbeddedName, embedded_path
from gemray_workers.messages import Submit
from gemray_workers.model.kv_groups import kv_group_specs
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import SoloCommunicator
from support.checkpoints.quantized import FormatName, quantized_checkpoint
from support.engine.engine_runner import Run, engine_config
from support.engine.held_out_requests import held_out_prompts, held_out_requests
from support.engine.speculation_rig import Rig
from support.oracles.oracle import loaded_model, prompt_logits

TARGET: EmbeddedName = "gemray-tiny"
DRAFTERS: dict[EmbeddedName, int | None] = {"gemray-tiny-assistant": 4, "gemray-tiny-dflash": None}
"""Each drafter's number of drafts; None for a whole block."""
MAX_TOKENS = 48


@dataclass(frozen=True)
class Measured:
    """One format."""

    name: str
    weight_bytes: int
    """As they lie in memory: packed codes and scales, embedding and norms in bfloat16."""
    nats: float
    """Per held-out token."""
    tokens_per_round: dict[EmbeddedName, float]
    """Accepted drafts and the token that each round adds."""
    ids_differ: int
    """Requests whose ids with a drafter are not those without."""
    kv_bytes: int
    """Bytes of one token's keys and values, in all layers."""


@torch.no_grad()
def held_out_nats(model: TargetModel, prompts: Sequence[Sequence[int]], kv_dtype: torch.dtype | None = None) -> float:
    """Mean negative log-probability of each prompt's tokens but its first, over a cache of the model's dtype or another
    one."""
    total, count = 0.0, 0
    for ids in prompts:
        logprobs_TV = prompt_logits(model, ids, kv_dtype=kv_dtype)[:-1].double().log_softmax(-1)
        total -= logprobs_TV.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
        count += len(ids) - 1
    return total / count


def measure(
    name: FormatName | None,
    *,
    num_prompts: int,
    num_requests: int,
    kv_dtype: KVDTypeName = "auto",
    dtype: torch.dtype = torch.float32,
) -> Measured:
    """Quantize, load as the engine does, and measure.

    Args:
        name: the format; None for the weights as they are.
        num_prompts: held-out prompts for the loss.
        num_requests: greedy requests for acceptance.
        kv_dtype: of the target's pages.
        dtype: of the model.
    """
    directory = embedded_path(TARGET)
    if name is not None:
        directory, _ = quantized_checkpoint(directory, lambda _layer: name)
    model = loaded_model(directory, SoloCommunicator(), dtype)
    prompts = [prompt["ids"] for prompt in held_out_prompts(num_prompts)]
    pages_dtype = engine_config(directory, dtype=str(dtype).removeprefix("torch."), kv_dtype=kv_dtype).torch_kv_dtype
    nats = held_out_nats(model, prompts, pages_dtype)
    submits = held_out_requests(num_requests, MAX_TOKENS, stop_token_ids=tuple(_stop_ids(directory)))
    plain = _serve(model, directory, None, None, submits, kv_dtype)
    rounds, ids_differ = {}, 0
    for drafter, most in DRAFTERS.items():
        run = _serve(model, directory, drafter, most, submits, kv_dtype)
        rounds[drafter] = 1 + run.speculation.accepted / run.speculation.rounds
        ids_differ += sum(run.ids[submit.request_id] != plain.ids[submit.request_id] for submit in submits)
    in_memory = loaded_model(directory, SoloCommunicator(), torch.bfloat16).weight_bytes
    specs = kv_group_specs(model.config, tp_size=1, page_size=16, dtype=pages_dtype)
    kv_bytes = sum(spec.bytes_per_token for spec in specs)
    return Measured(name or "bfloat16", in_memory, nats, rounds, ids_differ, kv_bytes)


def keep(name: FormatName, directory: Path) -> Path:
    """Write the target in a format below `directory`, and tell where."""
    packed, _ = quantized_checkpoint(embedded_path(TARGET), lambda _layer: name)
    return Path(shutil.copytree(packed, directory / f"{TARGET}-{name}"))


def _serve(
    model: TargetModel,
    directory: Path,
    drafter: EmbeddedName | None,
    most: int | None,
    submits: Sequence[Submit],
    kv_dtype: KVDTypeName,
) -> Run:
    path = None if drafter is None else embedded_path(drafter)
    rig = Rig(model, directory, drafter_path=path, num_draft_tokens=most, kv_dtype=kv_dtype)
    return rig.run(list(submits), prefill_chunk=128, max_step_tokens=1024, max_model_len=512, num_slots=16)


def _stop_ids(directory: Path) -> list[int]:
    ids: int | list[int] = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    return [ids] if isinstance(ids, int) else ids


def table(found: Sequence[Measured]) -> list[str]:
    """Markdown: a row a format, the first one as it is on disk."""
    first = found[0]
    lines = [
        "| weights | MB in memory | held-out nats | more than bfloat16 | MTP 4 a round | DFlash 15 | ids differ |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        rates = " | ".join(f"{rate:.2f}" for rate in row.tokens_per_round.values())
        more = row.nats - first.nats
        size = row.weight_bytes / 1e6
        lines.append(f"| {row.name} | {size:.2f} | {row.nats:.4f} | {more:+.4f} | {rates} | {row.ids_differ} |")
    return lines


CACHES: tuple[tuple[torch.dtype, KVDTypeName], ...] = (
    (torch.float32, "auto"),
    (torch.float32, "fp8_e4m3"),
    (torch.bfloat16, "auto"),
    (torch.bfloat16, "fp8_e4m3"),
)
"""Dtypes of the model and of its KV pages."""


def table_of_caches(found: Mapping[tuple[torch.dtype, KVDTypeName], Measured]) -> list[str]:
    """Markdown: a row a cache, with what it costs beside pages of the model's dtype."""
    lines = [
        "| model | KV pages | KV bytes a token | held-out nats | more | MTP 4 a round | DFlash 15 | ids differ |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (dtype, kv_dtype), row in found.items():
        rates = " | ".join(f"{rate:.2f}" for rate in row.tokens_per_round.values())
        model = str(dtype).removeprefix("torch.")
        pages = model if kv_dtype == "auto" else kv_dtype
        more = row.nats - found[dtype, "auto"].nats
        lines.append(
            f"| {model} | {pages} | {row.kv_bytes} | {row.nats:.4f} | {more:+.4f} | {rates} | {row.ids_differ} |"
        )
    return lines
