"""What a target rank holds by its blueprint alone: the model with its shard of the weights, and pools of KV pages."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gemray_kernels.numerics import Numerics
from gemray_workers.checkpoint.loader import LoadReport, ProgressFn
from gemray_workers.checkpoint.source import weight_source
from gemray_workers.kv.pool import KVPools
from gemray_workers.kv.scales import KVScales
from gemray_workers.model.attention import AttentionKernel
from gemray_workers.model.kv_groups import kv_donors
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.rank.blueprint import Blueprint


def load_target(
    blueprint: Blueprint,
    comm: Communicator,
    device: torch.device,
    attention: AttentionKernel,
    progress: ProgressFn | None,
) -> tuple[TargetModel, LoadReport]:
    """The model, with this rank's shard of the weights, and what loading them did.

    Args:
        blueprint: of the gang.
        comm: the target's ranks.
        device: of this rank.
        attention: what computes its attention.
        progress: told of bytes read.

    Raises CheckpointError: a checkpoint is missing, damaged or of another shape.
    """
    settings, config = blueprint.config, blueprint.model
    model = TargetModel(
        config,
        comm,
        dtype=settings.torch_dtype,
        device=device,
        attention=attention,
        numerics=Numerics(settings.numerics),
    )
    fill_weights = weight_source(settings)
    report = fill_weights(
        settings.model_path,
        model.weight_targets(),
        prefix=config.weight_prefix,
        is_ignored=model.ignored_name,
        progress=progress,
    )
    return model, report


def target_pools(blueprint: Blueprint, scales: Mapping[int, KVScales], device: torch.device) -> KVPools:
    """Pages of the target's layers that own KV; `scales` of 8-bit ones by layer, 1 where there is none."""
    donors = kv_donors(blueprint.model.layers)
    return KVPools(donors, blueprint.target_specs, blueprint.pools.num_pages, device=device, scales=scales)


def drafter_pools(blueprint: Blueprint, device: torch.device) -> KVPools | None:
    """Pages of colocated drafters that have KV of their own; None where none has."""
    plan = blueprint.drafter
    if not plan.kv_specs:
        return None
    return KVPools(kv_donors(plan.kv_layers), plan.kv_specs, blueprint.pools.num_pages, device=device)
