"""Memory of a long context in the five published geometries (spec 2.2): the window on sliding layers, all on full ones.

Nothing of the size is allocated: the scheduler runs on numbers, the pools lie on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from gemray_workers.kv.budget import fit_pools
from gemray_workers.kv.pool import KVPools
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.messages import Submit
from gemray_workers.model.config import LayerConfig, LayerKind, ModelConfig, RopeConfig
from gemray_workers.model.kv_groups import kv_donors, kv_group_specs
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.outcome import SequenceOutcome
from gemray_workers.scheduling.scheduler import Scheduler, SchedulerConfig

MIB = 1 << 20
CONTEXT = 32768
CHUNK = 512
PAGE_SIZE = 16


@dataclass(frozen=True)
class Geometry:
    """What of a published config decides the KV memory, and the spec's figures in MiB for a 32k context."""

    name: str
    num_layers: int
    full_every: int
    num_shared: int
    window: int
    sliding_heads: int
    full_heads: int
    ring_mib: int
    flat_mib: int


GEOMETRIES = [
    Geometry("E2B", 35, 5, 20, 512, 1, 1, 198, 576),
    Geometry("E4B", 42, 6, 18, 512, 2, 2, 532, 1792),
    Geometry("12B", 48, 6, 0, 1024, 8, 1, 832, 10752),
    Geometry("26B", 30, 6, 0, 1024, 8, 2, 840, 7040),
    Geometry("31B", 60, 6, 0, 1024, 16, 4, 3360, 28160),
]


def model_of(geometry: Geometry) -> ModelConfig:
    first_shared = geometry.num_layers - geometry.num_shared
    kinds: list[LayerKind] = [
        "full" if index % geometry.full_every == geometry.full_every - 1 else "sliding"
        for index in range(geometry.num_layers)
    ]
    donors = {kind: index for index, kind in enumerate(kinds[:first_shared])}
    return ModelConfig(
        model_type="gemma4_text",
        hidden_size=64,
        vocab_size=256,
        num_added=0,
        has_own_head=False,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        final_logit_softcapping=30.0,
        sliding_window=geometry.window,
        weight_prefix="model.",
        layers=tuple(
            LayerConfig(
                index=index,
                kind=kind,
                num_kv_heads=geometry.full_heads if kind == "full" else geometry.sliding_heads,
                head_dim=512 if kind == "full" else 256,
                window=None if kind == "full" else geometry.window,
                rope=RopeConfig(theta=1e4, kind="default", partial_rotary_factor=1.0, factor=1.0),
                k_eq_v=False,
                kv_donor=donors[kind] if index >= first_shared else None,
                intermediate_size=64,
            )
            for index, kind in enumerate(kinds)
        ),
        moe=None,
        per_layer_embedding=None,
        eos_token_ids=(1,),
    )


def bytes_held(scheduler: Scheduler, specs: tuple[KVGroupSpec, ...], pools: KVPools) -> int:
    """Bytes of the tensors' pages that sequences own now."""
    return sum(
        pages.nbytes // pages.shape[0] * scheduler.ledger.pages_in_use[spec.name]
        for spec in specs
        for layer in spec.layers
        for pages in (pools.caches.reader(layer).k_pages, pools.caches.reader(layer).v_pages)
    )


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_a_32k_context_takes_the_ring_and_not_the_flat_memory(geometry: Geometry) -> None:
    model = model_of(geometry)
    specs = kv_group_specs(model, tp_size=1, page_size=PAGE_SIZE, dtype=torch.bfloat16)
    plan = fit_pools(
        specs,
        kv_memory_bytes=8192 * MIB,
        requested_len=CONTEXT + 8,
        max_num_seqs=2,
        max_step_tokens=CHUNK,
        num_draft_tokens=0,
    )
    pools = KVPools(kv_donors(model.layers), specs, plan.num_pages, device=torch.device("meta"))
    assert pools.num_bytes == plan.num_bytes <= 8192 * MIB
    assert plan.max_model_len == CONTEXT + 8
    config = SchedulerConfig(
        max_num_seqs=2, max_step_tokens=CHUNK, prefill_chunk=CHUNK, max_model_len=plan.max_model_len
    )
    scheduler = Scheduler(config, specs, plan.num_pages)
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, max_tokens=4)
    scheduler.submit(Submit(request_id="long", prompt_ids=[2] * CONTEXT, params=params))
    sampled = False
    most_sliding_tokens = 0
    while not sampled:
        step = scheduler.schedule()
        assert step is not None
        most_sliding_tokens = max(most_sliding_tokens, scheduler.ledger.pages_in_use["sliding"] * PAGE_SIZE)
        outcomes = [SequenceOutcome(rows.slot, [5]) for rows in step.scheduled if rows.samples]
        sampled = bool(scheduler.commit(step, outcomes))
    assert scheduler.running[0].num_computed == CONTEXT
    assert bytes_held(scheduler, specs, pools) == geometry.ring_mib * MIB
    assert most_sliding_tokens == geometry.window + CHUNK
    scheduler.check_integrity()

    per_token = sum(spec.bytes_per_token for spec in specs)
    assert per_token * CONTEXT == geometry.flat_mib * MIB
    scheduler.cancel("long")
    last = scheduler.schedule()
    assert last is not None
    scheduler.commit(last, [])
    assert bytes_held(scheduler, specs, pools) == 0
