"""The memory that attention's kernels leave for each other, once for all layers, graphs and steps of a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from gemray_kernels.attention_scratch import AttentionShape, scratch_bytes
from gemray_workers.rank.blueprint import Blueprint


def attention_scratch_bytes(blueprint: Blueprint) -> int:
    """Bytes with which the target's largest step needs none beside; 0 where its attention backend needs none."""
    if blueprint.choices[0].chosen != "triton":
        return 0
    config, limits = blueprint.config, blueprint.widest
    num_columns = limits.max_model_len + limits.num_draft_tokens + 1
    return max(
        scratch_bytes(
            AttentionShape(
                num_heads=blueprint.model.num_attention_heads // config.tensor_parallel_size,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                window=spec.window,
                table_keys=-(-num_columns // spec.page_size) * spec.page_size,
            ),
            limits.max_step_tokens,
            limits.max_num_seqs + 1,
            config.torch_dtype.itemsize,
        )
        for spec in blueprint.target_specs
    )


def attention_scratch(blueprint: Blueprint, device: torch.device) -> Tensor | None:
    """The memory, uint8; None where attention needs none."""
    num_bytes = attention_scratch_bytes(blueprint)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device) if num_bytes else None
