"""The eager model on CUDA: the CPU's numbers, and no wait for the GPU inside a forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gemray_kernels.reference.paged_attention import paged_attention
from gemray_workers.kv.cache import KVCaches
from gemray_workers.model.batch import ForwardBatch, GroupMetadata
from gemray_workers.model.config import (
    LayerConfig,
    LayerKind,
    ModelConfig,
    MoEConfig,
    PerLayerEmbeddingConfig,
    RopeConfig,
)
from gemray_workers.model.kv_groups import kv_group_specs
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import SoloCommunicator
from support.oracles.paged import PagedCache, Rows

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 259
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ROWS = [Rows(0, [3, 250, 17, 3, 99, 41, 7, 8, 9, 10, 11], 0), Rows(1, [5], 0), Rows(2, [258, 0, 1], 0)]


def everything() -> ModelConfig:
    """A model that has all at once: experts, per-layer embeddings, KV sharing, k_eq_v, two head dims."""
    ropes: dict[LayerKind, RopeConfig] = {
        "sliding": RopeConfig(theta=1e4, kind="default", partial_rotary_factor=1.0, factor=1.0),
        "full": RopeConfig(theta=1e6, kind="proportional", partial_rotary_factor=0.25, factor=1.0),
    }

    def layer(index: int, kind: LayerKind, donor: int | None = None) -> LayerConfig:
        full = kind == "full"
        return LayerConfig(
            index=index,
            kind=kind,
            num_kv_heads=1 if full else 2,
            head_dim=512 if full else 256,
            window=None if full else 8,
            rope=ropes[kind],
            k_eq_v=full,
            kv_donor=donor,
            intermediate_size=192,
        )

    return ModelConfig(
        model_type="gemma4",
        hidden_size=128,
        vocab_size=VOCAB_SIZE,
        num_added=0,
        has_own_head=False,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        final_logit_softcapping=30.0,
        sliding_window=8,
        weight_prefix="model.language_model.",
        layers=(layer(0, "sliding"), layer(1, "full"), layer(2, "sliding", donor=0), layer(3, "full", donor=1)),
        moe=MoEConfig(num_experts=8, top_k=2, intermediate_size=352),
        per_layer_embedding=PerLayerEmbeddingConfig(width=32, vocab_size=VOCAB_SIZE),
        eos_token_ids=(1,),
    )


def random_model(dtype: torch.dtype, device: torch.device, **options: Any) -> TargetModel:
    """The same weights whatever the dtype and device."""
    model = TargetModel(everything(), SoloCommunicator(), dtype=dtype, device=device, **options)
    generator = torch.Generator().manual_seed(0)
    for target in model.weight_targets():
        for copy in target.copies:
            values = torch.randn(copy.destination.shape, generator=generator)
            scale = 0.5 if copy.destination.dim() == 1 else copy.destination.shape[-1] ** -0.5
            copy.destination.copy_(values * scale)
    return model


def inputs(dtype: torch.dtype, device: torch.device) -> tuple[ForwardBatch, KVCaches]:
    config = everything()
    paged = PagedCache(config, num_sequences=3, max_len=16, dtype=dtype)
    batch = paged.batch(ROWS)
    specs = kv_group_specs(config, tp_size=1, page_size=4, dtype=dtype)
    owners = [layer.index for layer in config.layers if layer.kv_donor is None]
    pages = {i: (paged.caches.reader(i).k_pages.to(device), paged.caches.reader(i).v_pages.to(device)) for i in owners}
    donors = {layer.index: layer.kv_donor for layer in config.layers if layer.kv_donor is not None}
    moved = ForwardBatch(
        token_ids_T=batch.token_ids_T.to(device),
        positions_T=batch.positions_T.to(device),
        query_start_Z=batch.query_start_Z.to(device),
        kv_len_S=batch.kv_len_S.to(device),
        groups={
            name: GroupMetadata(g.block_table_SP.to(device), g.kv_index_T.to(device))
            for name, g in batch.groups.items()
        },
    )
    return moved, KVCaches(specs, pages, donors)


def logits(dtype: torch.dtype, device: torch.device) -> Tensor:
    model = random_model(dtype, device)
    return model.logits(model.forward(*inputs(dtype, device)).hidden_UH)[:, :VOCAB_SIZE].double().cpu()


def test_float64_logits_equal_those_of_the_cpu() -> None:
    torch.testing.assert_close(logits(torch.float64, CUDA), logits(torch.float64, CPU), rtol=0, atol=1e-5)


def test_float32_logits_equal_those_of_the_cpu() -> None:
    torch.testing.assert_close(logits(torch.float32, CUDA), logits(torch.float64, CPU), rtol=0, atol=1e-3)


def test_bfloat16_logits_are_as_near_the_truth_as_the_cpus() -> None:
    truth = logits(torch.float64, CPU)
    error = {device.type: (logits(torch.bfloat16, device) - truth).abs().mean() for device in (CPU, CUDA)}
    assert 0 < error["cuda"] < 1.5 * error["cpu"]


def test_a_forward_pass_never_waits_for_the_gpu() -> None:
    """Outside the reference of attention, which reads lengths on the host by design."""

    def no_attention(q_TND: Tensor, *_: Any, **__: Any) -> Tensor:
        return q_TND

    model = random_model(torch.bfloat16, CUDA, attention=no_attention)
    batch, kv = inputs(torch.bfloat16, CUDA)
    model.logits(model.forward(batch, kv, capture=(0, 3)).hidden_UH)  # libraries initialise
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.logits(model.forward(batch, kv, capture=(0, 3)).hidden_UH)
        with pytest.raises(RuntimeError, match="synchroniz"):
            paged_attention(
                torch.zeros(15, 4, 256, device=CUDA, dtype=torch.bfloat16),
                kv.reader(0).k_pages,
                kv.reader(0).v_pages,
                batch.groups["sliding"].block_table_SP,
                batch.query_start_Z,
                batch.kv_len_S,
                window=8,
                causal=True,
                scale=1.0,
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
