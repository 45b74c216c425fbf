"""Everything one target rank holds, built in order: weights, KV pools, drafter, and engines over them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from gemray_kernels.numerics import Numerics
from gemray_workers.attention.kernels import attention_kernel
from gemray_workers.checkpoint.loader import ProgressFn
from gemray_workers.config import EngineConfig
from gemray_workers.drafters.dedicated.remote import RemoteDrafter
from gemray_workers.drafters.protocol import Drafter, DrafterParts, DrafterTraits
from gemray_workers.engine.build import EngineParts, Schedule, build_engine, build_slots
from gemray_workers.engine.cycle import CycleOutput, CycleRunner
from gemray_workers.engine.engine import Engine
from gemray_workers.engine.graphs import Captures, given_up
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.engine.planner import Inbox
from gemray_workers.errors import CheckpointError, InvalidField
from gemray_workers.execution.slots import SlotTable
from gemray_workers.grammar.vocabulary import vocabulary_of_directory
from gemray_workers.kv.pool import KVPools
from gemray_workers.messages import MemoryInfo, ModelInfo, RankInfo
from gemray_workers.model.moe import OnExperts
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.parallel.torch_communicator import TorchCommunicator, silenced
from gemray_workers.rank.attention_memory import attention_scratch
from gemray_workers.rank.blueprint import Blueprint, device_name, place_of
from gemray_workers.rank.card_memory import CardMemory, card_memory
from gemray_workers.rank.compile_ahead import Rehearsal, target_stage
from gemray_workers.rank.exact_numerics import require_exact_device
from gemray_workers.rank.kv_room import KVRoom
from gemray_workers.rank.kv_scales import kv_scales, require_fp8_device
from gemray_workers.rank.largest_step import requests_of_largest_step
from gemray_workers.rank.memory import (
    PATIENCE_S,
    MemoryNeeds,
    free_bytes,
    gib,
    memory_info,
    require_room,
)
from gemray_workers.rank.rank_graphs import RankGraphs
from gemray_workers.rank.rehearsal import PresentBytes, find_room, told_as_capacity
from gemray_workers.rank.target_parts import drafter_pools, load_target, target_pools
from gemray_workers.rank.warm_up import OneByOne, requests_of
from gemray_workers.sampling.verify import Accept, verify


class EngineRank:
    """One target rank's model and memory. Engines are made over it: one for the warm-up, one to serve."""

    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator,
        device: torch.device,
        progress: ProgressFn | None = None,
        *,
        gang: TorchCommunicator | None = None,
        card: CardMemory | None = None,
    ) -> None:
        """Load this rank's shard and build its KV pools; where no size is configured small ones, see `kv_room`.

        Args:
            config: the gang's settings.
            comm: the target's ranks, which share the model.
            device: of this rank.
            progress: told of bytes read.
            gang: all ranks, when a drafter has one of its own beside the target's.
            card: the memory of the rank's card, best seen before anything was on it; None looks now.

        Raises:
            InvalidField: a setting does not fit the model (TP, drafter, backend, lengths) or the device.
            CheckpointError: a checkpoint is missing, damaged or of another shape.
            CapacityError: the KV memory holds not even one sequence, or the device not weights and KV memory.
        """
        self._config = config
        self._comm = comm
        self._gang = gang
        self._device = device
        self._blueprint = Blueprint.of(config)
        require_fp8_device(config, device)
        require_exact_device(config, device)
        scales = kv_scales(config, self._blueprint.model)
        self._card = card_memory(device) if card is None else card
        self._place = place_of(comm.rank, device)
        needs = MemoryNeeds.of(self._blueprint)
        require_room(
            needs,
            lambda: free_bytes(device),
            place=self._place,
            patience_s=PATIENCE_S,
            states_kv=config.kv_memory_bytes is not None,
        )
        self._work_bytes = needs.work
        self._scratch = attention_scratch(self._blueprint, device)
        attention = attention_kernel(self._blueprint.choices[0], Numerics(config.numerics), self._scratch)
        self._model, self.load_report = load_target(self._blueprint, comm, device, attention, progress)
        # Now and not at the first grammar: nothing else of the process runs meanwhile.
        self._vocabulary = (
            vocabulary_of_directory(config.model_path, self._blueprint.model.vocab_size) if comm.rank == 0 else None
        )
        self._pools = target_pools(self._blueprint, scales, device)
        self._drafter_pools = drafter_pools(self._blueprint, device) if gang is None else None
        self._drafter = self._build_drafter(progress) if gang is None else self._remote_drafter(gang)
        self._slots = self._build_slots()
        self._runners: dict[tuple[Drafter, Accept], CycleRunner[CycleOutput]] = {}
        self._graphs = RankGraphs(self._card, device, given_up, rank=comm.rank, place=self._place)

    def engine(
        self,
        inbox: Inbox | None,
        *,
        drafter: Drafter | None = None,
        accept: Accept = verify,
        lag: int | None = None,
        on_experts: OnExperts | None = None,
    ) -> Engine:
        """An engine with no requests.

        Args:
            inbox: what feeds it, on rank 0; None on the others.
            drafter: stands in for this rank's own (tests).
            accept: stands in for the rule of verification (measurements with made-up acceptance).
            lag: at most the configured one, for which the pools have room; None is that one.
            on_experts: told of every layer's experts (measurements); cycles then run kernel by kernel.

        Raises:
            InvalidField: `lag` is more than the configured one.
        """
        drafter = drafter or self._drafter
        if lag is not None and lag > self._config.lag:
            raise InvalidField("lag", lag, f"at most the configured {self._config.lag}")
        self._model.watch_experts(on_experts)
        parts = self._parts(drafter)
        runner = self._runner(drafter, accept) if on_experts is None else parts.cycle(accept)
        return self._engine(parts, inbox, runner, lag)

    def rehearsal(self) -> Rehearsal:
        """What this rank's cycles are rehearsed on."""
        return Rehearsal(
            self._comm.rank,
            self._blueprint,
            self._device,
            lambda: target_stage(self._parts(self._drafter, self._build_slots())),
            one_layer_a_kind=partial(self._model.one_layer_a_kind, self._traits.captured_layers),
            silenced=self._silenced,
        )

    @contextmanager
    def _silenced(self) -> Iterator[None]:
        with silenced(self._comm), silenced(self._gang):
            yield

    def kv_room(self, ranks_here: int) -> KVRoom:
        """What this rank can give to KV pages, where no size is configured: on a card found by rehearsing, in which all
        ranks take part. `size_pools` must follow.

        Args:
            ranks_here: ranks of the gang on this host, which on a CPU share what is free.

        Raises:
            CapacityError: the card cannot even hold the largest step.
        """
        room = find_room(
            self._card,
            self._device,
            PresentBytes(
                weights=self._model.weight_bytes,
                drafter=self._drafter.weight_bytes,
                pools=sum(pools.num_bytes for pools in self._all_pools),
                num_pool_tensors=sum(pools.num_tensors for pools in self._all_pools),
            ),
            place=self._place,
            remedy="lower max_num_seqs, max_step_tokens or prefill_chunk, or raise tp",
            utilization=self._config.gpu_memory_utilization,
            ranks_here=ranks_here,
            run=self._run_largest_step,
            graphs=lambda: self._graphs.to_capture(
                self._parts(self._drafter).cycle(), self._blueprint, self._slots.null_slot
            ),
        )
        if self._card is not None:
            self._work_bytes = room.work
        return room

    def size_pools(self, blueprint: Blueprint) -> None:
        """Give the pools the size of the KV memory that was found, in place of the small ones.

        Raises CapacityError when the memory is no longer there.
        """
        self._runners.clear()
        for pools in self._all_pools:
            pools.release()
        self._blueprint = blueprint
        self._slots = self._build_slots()
        if self._card is not None:
            self._card.give_back()
        size = gib(blueprint.pools.num_bytes)
        with told_as_capacity(
            self._place,
            f"for {size} of KV pages, which were free a moment ago: another process has taken memory "
            "there; start again, or state a kv_memory",
        ):
            for pools in self._all_pools:
                pools.allocate(blueprint.pools.num_pages)

    def _run_largest_step(self) -> None:
        submits = requests_of_largest_step(
            self._blueprint.config,
            [member.method for member in self._blueprint.drafter.members],
            self._traits.num_draft_tokens,
            self._blueprint.requested_len,
        )
        inbox = LocalInbox(submits) if self._comm.rank == 0 else None
        parts = self._parts(self._drafter)
        self._engine(parts, inbox, parts.cycle()).run()

    @property
    def _all_pools(self) -> list[KVPools]:
        return [self._pools] if self._drafter_pools is None else [self._pools, self._drafter_pools]

    def _build_slots(self) -> SlotTable:
        blueprint = self._blueprint
        return build_slots(
            blueprint.widest,
            blueprint.specs if self._gang is None else blueprint.target_specs,
            self._model.shard,
            self._config.torch_dtype,
            self._device,
        )

    def _engine(
        self, parts: EngineParts, inbox: Inbox | None, runner: CycleRunner[CycleOutput], lag: int | None = None
    ) -> Engine:
        return build_engine(
            parts,
            Schedule(
                self._blueprint.scheduler,
                self._blueprint.specs,
                self._blueprint.pools.num_pages,
                draft_tokens={member.method: member.num_draft_tokens for member in self._blueprint.drafter.members},
                adapt_draft_tokens=self._config.adapt_draft_tokens,
                vocabulary=self._vocabulary,
            ),
            inbox,
            runner=runner,
            lag=lag,
            listeners=self._gang,
            poisoned=self._all_pools if self._config.poison_freed_pages else [],
        )

    def _parts(self, drafter: Drafter, slots: SlotTable | None = None) -> EngineParts:
        slots = self._slots if slots is None else slots
        return EngineParts(self._model, self._comm, self._pools.caches, slots, drafter, self._traits.captured_layers)

    def _runner(self, drafter: Drafter, accept: Accept) -> CycleRunner[CycleOutput]:
        """What runs the cycles of this drafter and rule; graphs are captured at the first call."""
        found = self._runners.get((drafter, accept))
        if found is None:
            cycle = self._parts(drafter).cycle(accept)
            found = self._graphs.runner(cycle, self._blueprint, self._slots.null_slot)
            self._runners[drafter, accept] = found
        return found

    @property
    def captures(self) -> Captures:
        """What capturing has cost so far."""
        return self._graphs.captures

    def warm_up(self, accept: Accept = verify) -> None:
        """Generate a few tokens through every part of a step and, where kernels are compiled, each kind of choice.

        Raises CheckpointError if the model gives no usable logits.
        """
        if self._comm.rank != 0:
            self.engine(None, accept=accept).run()
            return
        compiles = self._device.type != "cpu"
        has_grammars = self._vocabulary is not None
        inbox = OneByOne(requests_of(self._blueprint, has_grammars=has_grammars, compiles=compiles))
        self.engine(inbox, accept=accept).run()
        for delta in inbox.deltas:
            if delta.fault is not None:
                raise CheckpointError(f"{self._config.model_path} cannot generate ({delta.request_id}): {delta.fault}")

    def model_info(self) -> ModelInfo:
        """The served model, as clients see it."""
        return self._blueprint.model_info()

    def rank_info(self) -> RankInfo:
        """What this rank holds."""
        blueprint = self._blueprint
        return RankInfo(
            rank=self._comm.rank,
            host=socket.gethostname(),
            device=device_name(self._device),
            shard_indices=self._model.shard.record(),
            weight_bytes=self._model.weight_bytes + self._drafter.weight_bytes,
            kv_groups=blueprint.group_infos(blueprint.target_specs if self._drafter_pools is None else blueprint.specs),
            memory=self._memory_info(),
        )

    def _memory_info(self) -> MemoryInfo:
        kv = self._blueprint.kv
        return memory_info(
            self._device,
            self._card,
            weights=self._model.weight_bytes,
            drafter=self._drafter.weight_bytes,
            kv=sum(pools.num_bytes for pools in self._all_pools),
            graphs=self._graphs.num_bytes,
            work=self._work_bytes,
            kv_budget=0 if kv is None else kv.target,
        )

    @property
    def _traits(self) -> DrafterTraits:
        return self._blueprint.drafter.traits

    def _build_drafter(self, progress: ProgressFn | None) -> Drafter:
        return self._blueprint.drafter.build(
            DrafterParts(
                embedding=self._model.embedding,
                head_table=self._model.head_table,
                shard=self._model.shard,
                target_caches=self._pools.caches,
                own_caches=None if self._drafter_pools is None else self._drafter_pools.caches,
                comm=self._comm,
                num_slots=self._config.max_num_seqs,
                dtype=self._config.torch_dtype,
                device=self._device,
                attention=[
                    attention_kernel(choice, Numerics.FAST, self._scratch) for choice in self._blueprint.choices[1:]
                ],
                progress=progress,
            )
        )

    def _remote_drafter(self, gang: TorchCommunicator) -> Drafter:
        return RemoteDrafter(gang, rank=self._comm.rank, drafter_rank=gang.size - 1)
