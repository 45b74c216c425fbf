"""An engine put together from its public parts, with any drafter in it: loaded once, run many times.

`EngineRank` reads settings and drafter from a config; tests of speculation want many limits, pool sizes and drafters
over one loaded target, among them drafters that no checkpoint describes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gemray_kernels.numerics import Numerics
from gemray_kernels.reference.paged_attention import paged_attention
from gemray_workers.config import KVDTypeName, NumericsName
from gemray_workers.drafters.plan import plan_drafter
from gemray_workers.drafters.protocol import Drafter, DrafterParts
from gemray_workers.engine.build import EngineParts, Schedule, build_engine, build_slots
from gemray_workers.engine.engine import Engine
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.grammar.vocabulary import vocabulary_of_directory
from gemray_workers.kv.pool import KVPools
from gemray_workers.kv.prefix_cache import HashBlock, chained_hash
from gemray_workers.messages import Submit
from gemray_workers.model.kv_groups import kv_donors, kv_group_specs
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import Communicator, SoloCommunicator
from gemray_workers.rank.kv_scales import kv_scales
from gemray_workers.scheduling.scheduler import SchedulerConfig
from support.engine.engine_runner import Run, collect, engine_config
from support.engine.padded_cycle import PaddedCycle
from support.oracles.oracle import CPU, load_model, solo_model

NUM_SLOTS = 32
PAGE_SIZE = 4
GANG_PAGES = 256
"""Pages of each KV group on the ranks of a gang."""


class Rig:
    """A target, pools, and the drafter of a checkpoint or none; `run` serves requests with limits of its own."""

    def __init__(
        self,
        model: TargetModel,
        directory: Path,
        *,
        drafter_path: Path | None = None,
        second_drafter_path: Path | None = None,
        num_draft_tokens: int | None = None,
        comm: Communicator | None = None,
        num_pages: int = 1200,
        **settings: Any,
    ) -> None:
        """
        Args:
            model: the loaded target in `directory`.
            directory: its checkpoint.
            drafter_path: of a drafter's checkpoint.
            second_drafter_path: of another one's, for two drafters.
            num_draft_tokens: of the drafter's checkpoint, or of drafters given to `run`.
            comm: the ranks of `model`.
            num_pages: pages a KV group.
            settings: of the engine's config.
        """
        self.model = model
        self.comm = comm or SoloCommunicator()
        self.config = engine_config(
            directory,
            tensor_parallel_size=self.comm.size,
            dtype=str(model.dtype).removeprefix("torch."),
            drafter_path=None if drafter_path is None else str(drafter_path),
            second_drafter_path=None if second_drafter_path is None else str(second_drafter_path),
            num_draft_tokens=num_draft_tokens,
            max_num_seqs=NUM_SLOTS,
            page_size=PAGE_SIZE,
            **settings,
        )
        self.plan = plan_drafter(self.config, model.config)
        self.num_draft_tokens = (num_draft_tokens or 0) if drafter_path is None else self.plan.traits.num_draft_tokens
        target_specs = kv_group_specs(
            model.config, tp_size=self.comm.size, page_size=PAGE_SIZE, dtype=self.config.torch_kv_dtype
        )
        self.target_groups = tuple(spec.name for spec in target_specs)
        self.specs = (*target_specs, *self.plan.kv_specs)
        self.num_pages = {spec.name: num_pages for spec in self.specs}
        self.vocabulary = vocabulary_of_directory(str(directory), model.config.vocab_size)
        self.scales = kv_scales(self.config, model.config)
        self.pools = KVPools(
            kv_donors(model.config.layers), target_specs, self.num_pages, device=CPU, scales=self.scales
        )
        own = KVPools(kv_donors(self.plan.kv_layers), self.plan.kv_specs, self.num_pages, device=CPU)
        self.drafter_pools = own if self.plan.kv_specs else None
        self.drafter = self.plan.build(
            DrafterParts(
                embedding=model.embedding,
                head_table=model.head_table,
                shard=model.shard,
                target_caches=self.pools.caches,
                own_caches=None if self.drafter_pools is None else self.drafter_pools.caches,
                comm=self.comm,
                num_slots=NUM_SLOTS,
                dtype=self.config.torch_dtype,
                device=CPU,
                attention=[paged_attention] * len(self.plan.needs),
            )
        )

    @property
    def draft_tokens(self) -> dict[str, int] | None:
        """Most drafts by method, as of `Schedule`."""
        return {member.method: member.num_draft_tokens for member in self.plan.members} or None

    def engine(
        self,
        inbox: LocalInbox | None,
        *,
        drafter: Drafter | None = None,
        captured_layers: tuple[int, ...] | None = None,
        prefill_chunk: int = 64,
        max_step_tokens: int | None = None,
        max_model_len: int = 256,
        num_pages: Mapping[str, int] | None = None,
        num_slots: int = NUM_SLOTS,
        admission_headroom: int = 16,
        padded: bool = False,
        lag: int = 1,
        prefix_cache: bool = True,
        hash_block: HashBlock | None = None,
        adapt_draft_tokens: bool = False,
    ) -> Engine:
        """An engine over the loaded parts.

        Args:
            inbox: of rank 0; None on the other ranks.
            drafter: instead of the checkpoint's.
            captured_layers: instead of those that the drafter's plan names.
            prefill_chunk: see `EngineConfig`, like the next two.
            max_step_tokens: by default the least that every slot may draft in.
            max_model_len: see `EngineConfig`.
            num_pages: by group, at most what the pools have.
            num_slots: sequences at one time.
            admission_headroom: see `SchedulerConfig`; little of it provokes preemptions.
            padded: run cycles in the shapes of graphs.
            lag: steps in flight while the next is planned.
            prefix_cache: whether pages are found again.
            hash_block: of the cache's blocks.
            adapt_draft_tokens: as of `EngineConfig`.
        """
        scheduler = SchedulerConfig(
            max_num_seqs=num_slots,
            max_step_tokens=max_step_tokens or max(num_slots * (1 + self.num_draft_tokens), 64),
            prefill_chunk=prefill_chunk,
            max_model_len=max_model_len,
            num_draft_tokens=self.num_draft_tokens,
            admission_headroom=admission_headroom,
            lag=lag,
            prefix_cache=prefix_cache,
            tells_freed_pages=True,
        )
        parts = EngineParts(
            self.model,
            self.comm,
            self.pools.caches,
            build_slots(scheduler, self.specs, self.model.shard, self.model.dtype, CPU),
            drafter or self.drafter,
            self.plan.traits.captured_layers if captured_layers is None else captured_layers,
        )
        if padded:
            self.padded = PaddedCycle(
                parts.cycle(),
                max_num_seqs=num_slots,
                num_draft_tokens=list((self.draft_tokens or {"any": self.num_draft_tokens}).values()),
            )
        return build_engine(
            parts,
            Schedule(
                scheduler,
                self.specs,
                {**self.num_pages, **(num_pages or {})},
                draft_tokens=self.draft_tokens,
                adapt_draft_tokens=adapt_draft_tokens,
                vocabulary=self.vocabulary,
                hash_block=hash_block or chained_hash,
            ),
            inbox,
            runner=self.padded if padded else None,
            poisoned=[self.pools] if self.drafter_pools is None else [self.pools, self.drafter_pools],
        )

    def run(self, submits: list[Submit], **limits: Any) -> Run:
        """Serve `submits` to their end on rank 0 of a gang, or the only one; `limits` as of `engine`."""
        inbox = LocalInbox(submits)
        self.engine(inbox, **limits).run()
        return collect(inbox, submits)


@functools.lru_cache(maxsize=32)
def solo_rig(
    directory: Path,
    *,
    drafter_path: Path | None = None,
    second_drafter_path: Path | None = None,
    num_draft_tokens: int | None = None,
    dtype: torch.dtype = torch.float64,
    kv_dtype: KVDTypeName = "auto",
    numerics: NumericsName = "fast",
) -> Rig:
    """A rig on one rank, kept for the session; rigs of one checkpoint share the model."""
    return Rig(
        solo_model(directory, dtype, Numerics(numerics)),
        directory,
        drafter_path=drafter_path,
        second_drafter_path=second_drafter_path,
        num_draft_tokens=num_draft_tokens,
        kv_dtype=kv_dtype,
    )


def gang_rig(
    comm: Any,
    directory: Path,
    *,
    drafter_path: Path | None = None,
    second_drafter_path: Path | None = None,
    num_draft_tokens: int | None = None,
    dtype: torch.dtype = torch.float64,
    kv_dtype: KVDTypeName = "auto",
    numerics: NumericsName = "fast",
) -> Rig:
    """A rig on one rank of a gang, kept as long as the process; rigs of one checkpoint share the model."""
    if comm.size == 1:
        return solo_rig(
            directory,
            drafter_path=drafter_path,
            second_drafter_path=second_drafter_path,
            num_draft_tokens=num_draft_tokens,
            dtype=dtype,
            kv_dtype=kv_dtype,
            numerics=numerics,
        )
    return _gang_rig(comm, directory, drafter_path, second_drafter_path, num_draft_tokens, dtype, kv_dtype, numerics)


@functools.lru_cache(maxsize=64)
def _gang_rig(
    comm: Any,
    directory: Path,
    drafter_path: Path | None,
    second_drafter_path: Path | None,
    num_draft_tokens: int | None,
    dtype: torch.dtype,
    kv_dtype: KVDTypeName,
    numerics: NumericsName,
) -> Rig:
    return Rig(
        _gang_model(comm, directory, dtype, numerics),
        directory,
        drafter_path=drafter_path,
        second_drafter_path=second_drafter_path,
        num_draft_tokens=num_draft_tokens,
        comm=comm,
        num_pages=GANG_PAGES,
        kv_dtype=kv_dtype,
    )


@functools.lru_cache(maxsize=8)
def _gang_model(comm: Any, directory: Path, dtype: torch.dtype, numerics: NumericsName) -> TargetModel:
    return load_model(directory, comm, dtype, Numerics(numerics))
