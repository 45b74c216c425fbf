"""The least a cycle can take: bytes of the weights that it needs, over the speed at which the device reads memory.

Keys and values are left out (at a few hundred tokens they are below a percent), and so is all communication.
Embedding tables are counted where they serve as heads, which read them whole; looking up single rows costs next to
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemray_cluster.bench.probes import MatrixRates, ReadRates
from gemray_cluster.bench.report import Floor, PrefillFloor
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.config import EngineConfig
from gemray_workers.drafters.dflash.config import DFlashConfig
from gemray_workers.drafters.dflash.model import DFlashModel
from gemray_workers.drafters.mtp.assistant import AssistantModel
from gemray_workers.drafters.mtp.config import AssistantConfig
from gemray_workers.drafters.protocol import DrafterTraits
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.target import TargetModel, first_narrowed
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.parallel.silent_communicator import SilentCommunicator
from gemray_workers.rank.blueprint import Blueprint

_META = torch.device("meta")


@dataclass(frozen=True)
class Reads:
    """What one rank reads in a cycle, in bytes."""

    dense: int
    """The head among them."""
    head: int
    experts: int
    """All of them."""
    dense_weights: int
    """Numbers in `dense` without the head, however they are packed."""
    expert_weights: int
    """Numbers in `experts`."""
    last_dense_weights: int
    """Numbers in `dense_weights` that only rows meet whose output is used."""
    last_expert_weights: int
    """Numbers in `expert_weights` of which that is true."""
    drafter: int
    """One draft step of MTP, or one block of DFlash."""


def floor_of(
    config: EngineConfig,
    batch: int,
    rates: ReadRates,
    experts_touched: float | None = None,
    drafter: int | None = 0,
) -> Floor:
    """Compute the floor of one cycle of `batch` sequences that all draft as many tokens as they may.

    Args:
        config: the engine's.
        batch: sequences.
        rates: at which the device reads.
        experts_touched: of each layer, where it is known; else what independent rows are expected to touch.
        drafter: which of the plan's drafters drafts; None for none. What a second one reads to follow is left out.
    """
    blueprint = Blueprint.of(config)
    drafts = None if drafter is None else next(iter(blueprint.drafter.members[drafter:]), None)
    num_drafts = 0 if drafts is None else drafts.num_draft_tokens
    reads = _reads(config, blueprint, batch, drafts)
    moe = blueprint.model.moe
    share, touched = 1.0, None
    if moe is not None:
        rows = batch * (1 + num_drafts)
        expected = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** rows)
        touched = expected if experts_touched is None else experts_touched
        share = touched / moe.num_experts
    target = reads.dense + round(share * reads.experts)
    drafter_bytes = reads.drafter * (num_drafts if drafts is not None and drafts.method == "mtp" else 1)
    return Floor(
        target_bytes=target,
        drafter_bytes=drafter_bytes,
        experts_touched=touched,
        bandwidth=rates.best,
        ms=1000 * (target + drafter_bytes) / rates.best,
        sum_bandwidth=rates.sum,
        sum_ms=1000 * (target + drafter_bytes) / rates.sum,
    )


def prefill_floor_of(
    config: EngineConfig, num_tokens: int, *, matrix_rates: MatrixRates, bandwidth: float
) -> PrefillFloor:
    """Compute the floor of one prompt on one rank, drafters left out."""
    blueprint = Blueprint.of(config)
    reads = _reads(config, blueprint, 1, None)
    moe = blueprint.model.moe
    share = 1.0 if moe is None else moe.top_k / moe.num_experts
    met_by_one = reads.last_dense_weights + share * reads.last_expert_weights
    met_by_all = reads.dense_weights + share * reads.expert_weights - met_by_one
    operations = round(2 * (met_by_all * num_tokens + met_by_one))
    weight_bytes = reads.dense + reads.experts
    reading_s = weight_bytes / bandwidth
    return PrefillFloor(
        operations=operations,
        matrix_rate=matrix_rates.burst,
        weight_bytes=weight_bytes,
        bandwidth=bandwidth,
        ms=1000 * max(operations / matrix_rates.burst, reading_s),
        sustained_rate=matrix_rates.sustained,
        sustained_ms=1000 * max(operations / matrix_rates.sustained, reading_s),
    )


def _reads(config: EngineConfig, blueprint: Blueprint, batch: int, drafts: DrafterTraits | None) -> Reads:
    comm = SilentCommunicator(0, config.tensor_parallel_size)
    target = TargetModel(blueprint.model, comm, dtype=config.torch_dtype, device=_META)
    weights = target.weight_targets()
    of_experts = [t for t in weights if ".experts." in t.name]
    looked_up = [t for t in weights if t.name.startswith("embed_tokens_per_layer")]
    of_head = [t for t in weights if t.name == "embed_tokens.weight"]
    experts, head = _bytes(of_experts), _bytes(of_head)
    dense = _bytes(weights) - experts - _bytes(looked_up)
    dense_weights = _weights(weights) - _weights(of_experts) - _weights(looked_up) - _weights(of_head)
    expert_weights = _weights(of_experts)
    first = first_narrowed(blueprint.model, blueprint.drafter.traits.captured_layers)
    last = [t for t in weights if _meets_outputs_alone(t.name, blueprint.model, first)]
    last_expert_weights = _weights([t for t in last if ".experts." in t.name])
    match drafts:
        case DrafterTraits(method="mtp", path=path):
            drafter = _assistant_bytes(path, config, blueprint, target.shard, comm, batch)
        case DrafterTraits(method="dflash", path=path):
            own = SilentCommunicator(0, 1) if config.drafter_placement == "dedicated" else comm
            drafters_head = head * (config.tensor_parallel_size // own.size)
            drafter = _block_drafter_bytes(path, config, blueprint, own) + drafters_head
        case _:
            drafter = 0
    return Reads(
        dense,
        head,
        experts,
        dense_weights,
        expert_weights,
        _weights(last) - last_expert_weights,
        last_expert_weights,
        drafter,
    )


def _meets_outputs_alone(name: str, model: ModelConfig, first: int) -> bool:
    """Whether prompt rows without outputs end before the weight `name`; `first` as of `first_narrowed`."""
    layer = next((i for i in range(first, model.num_layers) if name.startswith(f"layers.{i}.")), None)
    if layer is None:
        return False
    makes_keys = layer == first and model.layers[first].kv_donor is None
    return not (makes_keys and any(f".{part}_proj." in name for part in ("q", "k", "v")))


def _assistant_bytes(
    path: str, config: EngineConfig, blueprint: Blueprint, shard: ShardIndices, comm: SilentCommunicator, batch: int
) -> int:
    assistant = AssistantConfig.from_directory(path, blueprint.model)
    model = AssistantModel(assistant, shard, comm, dtype=config.torch_dtype, device=_META)
    weights = [t for t in model.weight_targets() if not t.name.endswith("token_ordering")]
    if assistant.centroids is None:
        return _bytes(weights)
    # The centroid head reads the rows of a few clusters, not the table.
    table = [t for t in weights if t.name == "model.embed_tokens.weight"]
    share = min(1.0, batch * assistant.centroids.top_k / assistant.centroids.num_centroids)
    return _bytes(weights) - _bytes(table) + round(share * _bytes(table))


def _block_drafter_bytes(path: str, config: EngineConfig, blueprint: Blueprint, comm: SilentCommunicator) -> int:
    drafter = DFlashConfig.from_directory(path, blueprint.model)
    return _bytes(DFlashModel(drafter, comm, dtype=config.torch_dtype, device=_META).weight_targets())


def _weights(targets: list[WeightTarget]) -> int:
    return sum(target.weights_each * copy.destination.numel() for target in targets for copy in target.copies)


def _bytes(targets: list[WeightTarget]) -> int:
    return sum(copy.destination.nbytes for target in targets for copy in target.copies)
