"""Everything one rank holds, built in order: weights, KV pools, slot table, and engines over them."""

from __future__ import annotations

import socket

import torch

from gemray_workers.attention.choice import AttentionNeeds, choose_drafter_backend, choose_target_backend
from gemray_workers.checkpoint.loader import ProgressFn, load_weights
from gemray_workers.config import EngineConfig
from gemray_workers.drafters.plan import plan_drafter
from gemray_workers.drafters.protocol import Drafter, DrafterParts
from gemray_workers.engine.engine import Engine
from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.engine.planner import FollowPlanner, Inbox, LeadPlanner, Planner
from gemray_workers.engine.slots import SlotTable
from gemray_workers.engine.verification import Verifier
from gemray_workers.errors import CheckpointError
from gemray_workers.kv.budget import fit_pools
from gemray_workers.kv.pool import KVPools
from gemray_workers.messages import Choice, KVGroupInfo, ModelInfo, RankInfo, Submit
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.kv_groups import kv_group_specs
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.sampling.params import SamplingParams
from gemray_workers.scheduling.scheduler import Scheduler, SchedulerConfig

WARM_UP_TOKENS = 3


class EngineRank:
    """One rank's model and memory. Engines are made over it: one for the warm-up, one to serve."""

    def __init__(
        self,
        config: EngineConfig,
        comm: Communicator,
        device: torch.device,
        progress: ProgressFn | None = None,
    ) -> None:
        """Load this rank's shard and build its KV pools.

        Raises:
            InvalidField: a setting does not fit the model (TP, backend, lengths).
            CheckpointError: the checkpoint is missing, damaged or of another shape.
            CapacityError: the KV memory holds not even one sequence.
        """
        self._config = config
        self._comm = comm
        self._device = device
        self._model_config = ModelConfig.from_directory(config.model_path)
        self._drafter_plan = plan_drafter(config, self._model_config)
        self._target_specs = kv_group_specs(
            self._model_config,
            tp_size=config.tensor_parallel_size,
            page_size=config.page_size,
            dtype=config.torch_dtype,
        )
        self._specs = (*self._target_specs, *self._drafter_plan.kv_specs)
        self._choices = self._choose_attention()
        self._pool_plan = fit_pools(
            self._specs,
            kv_memory_bytes=config.kv_memory_bytes,
            requested_len=config.max_model_len or self._model_config.max_position_embeddings,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens,
            max_draft_tokens=self._max_draft_tokens,
        )
        self._model = self._load_target(progress)
        self._pools = KVPools(self._model_config.layers, self._target_specs, self._pool_plan.num_pages, device=device)
        self._drafter_pools = self._build_drafter_pools()
        self._drafter = self._build_drafter(progress)

    def engine(self, inbox: Inbox | None) -> Engine:
        """An engine with no requests; rank 0 gives the inbox that feeds it, the other ranks None."""
        return Engine(
            model=self._model,
            caches=self._pools.caches,
            pools=[self._pools] if self._drafter_pools is None else [self._pools, self._drafter_pools],
            slots=SlotTable(
                num_slots=self._config.max_num_seqs,
                max_model_len=self._pool_plan.max_model_len,
                max_draft_tokens=self._max_draft_tokens,
                specs=self._specs,
                device=self._device,
            ),
            drafter=self._drafter,
            captured_layers=self._drafter_plan.traits.captured_layers,
            verifier=Verifier(self._model, self._comm),
            planner=self._planner(inbox),
            poison_freed_pages=self._config.poison_freed_pages,
        )

    def warm_up(self) -> None:
        """Generate a few tokens through every part of a step; raise if the model gives no usable logits."""
        if self._comm.rank != 0:
            self.engine(None).run()
            return
        prompt = [min(2, self._model_config.vocab_size - 1)]
        inbox = LocalInbox([Submit(request_id="warm-up", prompt_ids=prompt, params=_warm_up_params())])
        self.engine(inbox).run()
        fault = inbox.last("warm-up").fault
        if fault is not None:
            raise CheckpointError(f"{self._config.model_path} cannot generate: {fault}")

    def model_info(self) -> ModelInfo:
        """The served model, as clients see it."""
        model = self._model_config
        return ModelInfo(
            model_type=model.model_type,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            layer_types=[layer.kind for layer in model.layers],
            vocab_size=model.vocab_size,
            max_model_len=self._pool_plan.max_model_len,
            max_position_embeddings=model.max_position_embeddings,
            dtype=self._config.dtype,
            tensor_parallel_size=self._config.tensor_parallel_size,
            sliding_window=model.sliding_window,
            choices=self._choices,
            drafter_method=self._drafter_plan.traits.method,
            max_draft_tokens=self._max_draft_tokens,
        )

    def rank_info(self) -> RankInfo:
        """What this rank holds."""
        return RankInfo(
            rank=self._comm.rank,
            host=socket.gethostname(),
            device=_device_name(self._device),
            shard_indices=self._model.shard.record(),
            weight_bytes=self._model.weight_bytes,
            kv_groups=[
                KVGroupInfo(
                    name=spec.name,
                    num_layers=len(spec.layers),
                    num_kv_heads=spec.num_kv_heads,
                    head_dim=spec.head_dim,
                    window=spec.window,
                    page_size=spec.page_size,
                    num_pages=self._pool_plan.num_pages[spec.name],
                    page_bytes=spec.page_bytes,
                )
                for spec in self._specs
            ],
        )

    @property
    def _max_draft_tokens(self) -> int:
        return self._drafter_plan.traits.max_draft_tokens

    def _load_target(self, progress: ProgressFn | None) -> TargetModel:
        model = TargetModel(self._model_config, self._comm, dtype=self._config.torch_dtype, device=self._device)
        load_weights(
            self._config.model_path,
            model.weight_targets(),
            prefix=self._model_config.weight_prefix,
            is_ignored=model.ignored_name,
            progress=progress,
        )
        return model

    def _build_drafter_pools(self) -> KVPools | None:
        plan = self._drafter_plan
        if not plan.kv_specs:
            return None
        return KVPools(plan.kv_layers, plan.kv_specs, self._pool_plan.num_pages, device=self._device)

    def _build_drafter(self, progress: ProgressFn | None) -> Drafter:
        parts = DrafterParts(
            target=self._model,
            target_caches=self._pools.caches,
            own_caches=None if self._drafter_pools is None else self._drafter_pools.caches,
            comm=self._comm,
            num_slots=self._config.max_num_seqs,
            dtype=self._config.torch_dtype,
            device=self._device,
            progress=progress,
        )
        return self._drafter_plan.build(parts)

    def _choose_attention(self) -> list[Choice]:
        config = self._config
        needs = AttentionNeeds(
            reader="target",
            head_dims=tuple(sorted({spec.head_dim for spec in self._target_specs})),
            dtype=config.dtype,
            causal=True,
        )
        target = choose_target_backend(needs, config.attention_backend, config.device)
        if self._drafter_plan.needs is None:
            return [target]
        explicit = config.drafter_attention_backend
        return [target, choose_drafter_backend(self._drafter_plan.needs, explicit, target, config.device)]

    def _planner(self, inbox: Inbox | None) -> Planner:
        if inbox is None:
            return FollowPlanner(self._comm)
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=self._config.max_num_seqs,
                max_step_tokens=self._config.max_step_tokens,
                prefill_chunk=self._config.prefill_chunk,
                max_model_len=self._pool_plan.max_model_len,
                max_draft_tokens=self._max_draft_tokens,
            ),
            self._specs,
            self._pool_plan.num_pages,
            draft_tokens_for=lambda _sequence: self._max_draft_tokens,
        )
        return LeadPlanner(scheduler, self._comm, inbox)


def _warm_up_params() -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=64, top_p=0.95, min_p=0.0, seed=0, max_tokens=WARM_UP_TOKENS)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
