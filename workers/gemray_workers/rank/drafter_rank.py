"""What the drafter's worker holds: the drafter, its KV pools, and copies of the target's embedding and head."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from gemray_workers.attention.kernels import attention_kernel
from gemray_workers.checkpoint.loader import ProgressFn
from gemray_workers.checkpoint.source import weight_source
from gemray_workers.checkpoint.target import WeightTarget, bytes_held
from gemray_workers.checkpoint.vocabulary import HEAD_WEIGHT
from gemray_workers.config import EngineConfig
from gemray_workers.drafters.protocol import Drafter, DrafterParts
from gemray_workers.engine.build import build_slots
from gemray_workers.engine.cycle import CycleRunner
from gemray_workers.engine.drafter_engine import DrafterCycle, DrafterEngine
from gemray_workers.engine.graphs import Captures
from gemray_workers.engine.planner import FollowPlanner
from gemray_workers.execution.cycle_rows import CyclePlan
from gemray_workers.execution.slots import SlotTable
from gemray_workers.kv.pool import KVPools
from gemray_workers.messages import ModelInfo, RankInfo
from gemray_workers.model.kv_groups import kv_donors
from gemray_workers.model.vocab_parallel import VocabParallelEmbedding, VocabParallelTable, head_table
from gemray_workers.model.weight_sharding import WeightSharding
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices
from gemray_workers.parallel.torch_communicator import TorchCommunicator, silenced
from gemray_workers.rank.blueprint import Blueprint, device_name, place_of
from gemray_workers.rank.card_memory import CardMemory, card_memory
from gemray_workers.rank.compile_ahead import Rehearsal
from gemray_workers.rank.kv_room import KVRoom
from gemray_workers.rank.memory import memory_info
from gemray_workers.rank.rank_graphs import RankGraphs
from gemray_workers.rank.rehearsal import PresentBytes, find_room, told_as_capacity
from gemray_workers.sampling.verify import Accept, verify


class DrafterRank:
    """The last rank of a gang with a dedicated drafter."""

    def __init__(
        self,
        config: EngineConfig,
        gang: TorchCommunicator,
        device: torch.device,
        progress: ProgressFn | None = None,
        *,
        card: CardMemory | None = None,
    ) -> None:
        """Load the drafter and the target's embedding and head, and build the drafter's KV pools; where no size is
        configured small ones, as `EngineRank` does. Arguments as of that.
        """
        self._card = card_memory(device) if card is None else card
        self._work_bytes = 0
        self._config = config
        self._gang = gang
        self._device = device
        self._blueprint = Blueprint.of(config)
        plan, model = self._blueprint.drafter, self._blueprint.model
        self._shard = ShardIndices.of_rank(0, 1, org_vocab_size=model.org_vocab_size, num_added=model.num_added)
        self._embedding, self._head_table = self._load_tables(progress)
        self._pools = KVPools(kv_donors(plan.kv_layers), plan.kv_specs, self._blueprint.pools.num_pages, device=device)
        self._drafter = plan.build(
            DrafterParts(
                embedding=self._embedding,
                head_table=self._head_table,
                shard=self._shard,
                target_caches=None,
                own_caches=self._pools.caches,
                comm=SoloCommunicator(),
                num_slots=config.max_num_seqs,
                dtype=config.torch_dtype,
                device=device,
                attention=[attention_kernel(self._blueprint.choices[-1])],
                progress=progress,
            )
        )
        self._slots = self._build_slots()
        self._runners: dict[tuple[Drafter, Accept], CycleRunner[None]] = {}
        self._graphs: RankGraphs[None] = RankGraphs(
            self._card, device, lambda nothing: nothing, rank=gang.rank, place=self._place
        )

    def rehearsal(self) -> Rehearsal:
        """What this rank's cycles are rehearsed on."""
        return Rehearsal(
            self._gang.rank,
            self._blueprint,
            self._device,
            self._stage,
            one_layer_a_kind=nullcontext,
            silenced=partial(silenced, self._gang),
        )

    def kv_room(self, ranks_here: int) -> KVRoom:
        """As `EngineRank.kv_room`: the target's largest step is followed."""
        room = find_room(
            self._card,
            self._device,
            PresentBytes(self._table_bytes, self._drafter.weight_bytes, self._pools.num_bytes, self._pools.num_tensors),
            place=self._place,
            remedy="lower max_num_seqs, max_step_tokens or prefill_chunk",
            utilization=self._config.gpu_memory_utilization,
            ranks_here=ranks_here,
            run=lambda: self.engine(kernel_by_kernel=True).run(),
            graphs=lambda: self._graphs.to_capture(
                self._cycle(self._drafter, self._slots), self._blueprint, self._slots.null_slot
            ),
        )
        self._work_bytes = room.work
        return room

    def size_pools(self, blueprint: Blueprint) -> None:
        """As `EngineRank.size_pools`."""
        self._runners.clear()
        self._pools.release()
        self._blueprint = blueprint
        self._slots = self._build_slots()
        if self._card is not None:
            self._card.give_back()
        with told_as_capacity(self._place, "for KV pages, for which it was free a moment ago: another process took it"):
            self._pools.allocate(blueprint.pools.num_pages)

    def engine(
        self, *, drafter: Drafter | None = None, accept: Accept = verify, kernel_by_kernel: bool = False
    ) -> DrafterEngine:
        """An engine with no requests, following rank 0.

        Args:
            drafter: stands in for this rank's own (tests).
            accept: the target's, which captures graphs of its own for each.
            kernel_by_kernel: as the target's ranks run the same steps, with no graphs.
        """
        drafter = drafter or self._drafter
        cycle = self._cycle(drafter, self._slots) if kernel_by_kernel else self._runner(drafter, accept)
        return self._engine(cycle, drafter, self._slots)

    def _engine(self, cycle: CycleRunner[None], drafter: Drafter, slots: SlotTable) -> DrafterEngine:
        return DrafterEngine(
            cycle=cycle,
            drafter=drafter,
            slots=slots,
            planner=FollowPlanner(self._gang),
            poisoned=[self._pools] if self._config.poison_freed_pages else [],
        )

    def _cycle(self, drafter: Drafter, slots: SlotTable) -> DrafterCycle:
        return DrafterCycle(
            drafter=drafter,
            slots=slots,
            link=self._gang,
            num_target_ranks=self._config.tensor_parallel_size,
            feature_shape=(len(self._blueprint.drafter.traits.captured_layers), self._blueprint.model.hidden_size),
            dtype=self._config.torch_dtype,
        )

    def _stage(self) -> Callable[[CyclePlan], None]:
        slots = self._build_slots()
        return self._engine(self._cycle(self._drafter, slots), self._drafter, slots).run_cycle

    def _runner(self, drafter: Drafter, accept: Accept) -> CycleRunner[None]:
        """What runs this drafter's cycles; graphs are captured at the first call, as the target's ranks capture theirs:
        what crosses between them is exchanged meanwhile."""
        found = self._runners.get((drafter, accept))
        if found is None:
            cycle = self._cycle(drafter, self._slots)
            found = self._graphs.runner(cycle, self._blueprint, self._slots.null_slot)
            self._runners[drafter, accept] = found
        return found

    @property
    def captures(self) -> Captures:
        """What capturing has cost so far."""
        return self._graphs.captures

    def _build_slots(self) -> SlotTable:
        return build_slots(
            self._blueprint.widest,
            self._blueprint.drafter.kv_specs,
            self._shard,
            self._config.torch_dtype,
            self._device,
        )

    def warm_up(self, accept: Accept = verify) -> None:
        """Follow the target's warm-up."""
        self.engine(accept=accept).run()

    def model_info(self) -> ModelInfo:
        """The served model, as clients see it."""
        return self._blueprint.model_info()

    def rank_info(self) -> RankInfo:
        """What this rank holds."""
        return RankInfo(
            rank=self._gang.rank,
            role="drafter",
            host=socket.gethostname(),
            device=device_name(self._device),
            shard_indices=self._shard.record(),
            weight_bytes=self._table_bytes + self._drafter.weight_bytes,
            kv_groups=self._blueprint.group_infos(self._blueprint.drafter.kv_specs),
            memory=memory_info(
                self._device,
                self._card,
                weights=self._table_bytes,
                drafter=self._drafter.weight_bytes,
                kv=self._pools.num_bytes,
                graphs=self._graphs.num_bytes,
                work=self._work_bytes,
                kv_budget=0 if self._blueprint.kv is None else self._blueprint.kv.drafter,
            ),
        )

    @property
    def _table_bytes(self) -> int:
        """Bytes of the copies of the target's embedding and head."""
        return bytes_held(self._table_targets(self._embedding, self._head_table))

    @property
    def _place(self) -> str:
        return place_of(self._gang.rank, self._device)

    def _load_tables(self, progress: ProgressFn | None) -> tuple[VocabParallelEmbedding, VocabParallelTable]:
        model = self._blueprint.model
        sharding = WeightSharding(0, 1, self._config.torch_dtype, self._device)
        embedding = VocabParallelEmbedding(
            "embed_tokens", self._shard, model.hidden_size, SoloCommunicator(), sharding, scale=model.hidden_size**0.5
        )
        table = head_table(embedding, self._shard, sharding, is_own=model.has_own_head)
        fill_weights = weight_source(self._config)
        fill_weights(
            self._config.model_path,
            self._table_targets(embedding, table),
            prefix=model.weight_prefix,
            is_ignored=lambda _name: True,
            progress=progress,
        )
        return embedding, table

    def _table_targets(self, embedding: VocabParallelEmbedding, table: VocabParallelTable) -> list[WeightTarget]:
        model = self._blueprint.model
        tied = None if model.has_own_head else HEAD_WEIGHT
        targets = embedding.weight_targets(model.vocab_size, stand_in=tied)
        return targets + table.weight_targets(model.vocab_size) if model.has_own_head else targets
