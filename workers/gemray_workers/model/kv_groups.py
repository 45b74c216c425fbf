"""How a model's layers fall into KV groups, and what tensor parallelism must divide (spec 2.2 and 6.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemray_workers.errors import InvalidField
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.model.config import LayerConfig, LayerKind, ModelConfig
from gemray_workers.parallel.shard_indices import VOCAB_PADDING, ShardIndices


def kv_donors(layers: Sequence[LayerConfig]) -> dict[int, int | None]:
    """Each layer's number, with the number of the layer whose KV it reads; None if it owns KV."""
    return {layer.index: layer.kv_donor for layer in layers}


def local_kv_heads(num_kv_heads: int, tp_size: int) -> int:
    """KV heads on each rank; a head that fewer layers than ranks have is replicated."""
    return max(1, num_kv_heads // tp_size)


def first_kv_head(num_kv_heads: int, tp_size: int, rank: int) -> int:
    """The first of the KV heads of `rank`: contiguous heads, or head ``rank // (tp / nk)`` when replicated."""
    return rank * num_kv_heads // tp_size


def check_tensor_parallel(model: ModelConfig, tp_size: int) -> None:
    """Raise unless every sharded dimension splits over `tp_size` ranks.

    Raises:
        InvalidField: names every dimension that does not split, with its size.
    """
    if tp_size < 1:
        raise InvalidField("tensor_parallel_size", tp_size, "an integer >= 1")
    faults = [f"{name} = {size}" for name, size in _divided_dimensions(model) if size % tp_size]
    faults += [
        f"num_key_value_heads of {kind} layers = {heads} (must divide or be divided by it)"
        for kind, heads in _kv_heads(model)
        if heads % tp_size and tp_size % heads
    ]
    if faults:
        raise InvalidField("tensor_parallel_size", tp_size, "it must divide " + "; ".join(faults))


def kv_group_specs(model: ModelConfig, *, tp_size: int, page_size: int, dtype: torch.dtype) -> tuple[KVGroupSpec, ...]:
    """The KV groups of the target on one rank: ``sliding`` and ``full``, those that exist, in this order.

    Raises:
        InvalidField: `tp_size` does not divide the model, see `check_tensor_parallel`.
    """
    check_tensor_parallel(model, tp_size)
    specs = []
    for kind, owners in model.kv_owners.items():
        if not owners:
            continue
        layer = model.layers[owners[0]]
        specs.append(
            KVGroupSpec(
                name=kind,
                layers=owners,
                num_kv_heads=local_kv_heads(layer.num_kv_heads, tp_size),
                head_dim=layer.head_dim,
                page_size=page_size,
                window=layer.window,
                dtype=dtype,
            )
        )
    return tuple(specs)


def _divided_dimensions(model: ModelConfig) -> list[tuple[str, int]]:
    dimensions = [("num_attention_heads", model.num_attention_heads)]
    widths = sorted({layer.intermediate_size for layer in model.layers})
    dimensions += [("intermediate_size", width) for width in widths]
    if model.moe is not None:
        dimensions.append(("moe_intermediate_size", model.moe.intermediate_size))
    whole = ShardIndices.of_rank(0, 1, org_vocab_size=model.org_vocab_size, num_added=model.num_added)
    dimensions.append((f"vocab_size padded to {VOCAB_PADDING}", whole.num_org_elements_padded))
    if whole.num_added_elements_padded:
        dimensions.append((f"added vocabulary padded to {VOCAB_PADDING}", whole.num_added_elements_padded))
    if model.per_layer_embedding is not None:
        table = ShardIndices.of_rank(0, 1, org_vocab_size=model.per_layer_embedding.vocab_size)
        dimensions.append((f"vocab_size_per_layer_input padded to {VOCAB_PADDING}", table.num_org_elements_padded))
    return dimensions


def _kv_heads(model: ModelConfig) -> list[tuple[LayerKind, int]]:
    return sorted({(layer.kind, layer.num_kv_heads) for layer in model.layers})
