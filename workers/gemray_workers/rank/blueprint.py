"""All that follows from settings and configs before a weight is read: groups, pools, drafter, backends.

Every rank makes the same blueprint from the same settings, so ranks agree without asking.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gemray_workers.attention.choice import AttentionNeeds, choose_backends
from gemray_workers.checkpoint.identity import CheckpointIdentity
from gemray_workers.checkpoint.quantized.kv_cache import FP8_E4M3
from gemray_workers.checkpoint.quantized.recipe import Recipe
from gemray_workers.config import LEAST_USUAL_CHUNK, EngineConfig, KVMemory
from gemray_workers.drafters.plan import plan_drafter
from gemray_workers.drafters.protocol import DrafterPlan
from gemray_workers.engine.prompt_room import usual_chunk
from gemray_workers.errors import CapacityError, InvalidField
from gemray_workers.kv.budget import PoolPlan, fit_pools
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.messages import Choice, DrafterInfo, KVGroupInfo, ModelInfo
from gemray_workers.model.config import ModelConfig
from gemray_workers.model.kv_groups import check_tensor_parallel, kv_group_specs
from gemray_workers.model.target import first_narrowed
from gemray_workers.rank.exact_numerics import require_exact
from gemray_workers.rank.largest_step import pools_of_largest_step
from gemray_workers.scheduling.config import SchedulerConfig

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What a gang will be."""

    config: EngineConfig
    """With a `prefill_chunk`, whether it was asked for or not."""
    model: ModelConfig
    drafter: DrafterPlan
    target_specs: tuple[KVGroupSpec, ...]
    """The target's KV groups on one of its ranks."""
    pools: PoolPlan
    """Pages of every group, the drafter's own included."""
    scheduler: SchedulerConfig
    """Limits of every step."""
    choices: tuple[Choice, ...]
    """Attention backends: the target's, then each drafter's."""
    kv: KVMemory | None
    """What the pools may take; None where it is yet to be found, and the pools hold the largest step's requests."""
    requested_len: int
    """Most tokens of a request if memory suffices."""

    @classmethod
    def of(cls, config: EngineConfig, kv: KVMemory | None = None) -> Blueprint:
        """Make the blueprint. Readings of config.json files are kept in `config`, for the ranks.

        Args:
            config: of the gang.
            kv: the KV memory that was found at start, where `config` does not state it.

        Raises:
            InvalidField: a setting does not fit the model (TP, drafter, backend, lengths) or another (rows of a step),
                or the KV memory that `config` states holds not even one sequence.
            CheckpointError: a directory without a usable config.
            CapacityError: the KV memory that was found holds not even one sequence.
        """
        model = ModelConfig.from_directory(config.model_path, config.hf_configs)
        check_tensor_parallel(model, config.tensor_parallel_size)  # first: numerics are not to blame for it
        require_exact(config, model)
        drafter = plan_drafter(config, model)
        if config.prefill_chunk is None:
            config = replace(config, prefill_chunk=_usual_chunk(config, model, drafter))
        target_specs = kv_group_specs(
            model, tp_size=config.tensor_parallel_size, page_size=config.page_size, dtype=config.torch_kv_dtype
        )
        if config.kv_memory_bytes is not None:
            kv = KVMemory(config.kv_memory_bytes, config.kv_memory_bytes)
        requested_len = _requested_len(config, model)
        num_draft_tokens = drafter.traits.num_draft_tokens
        pools = (
            pools_of_largest_step(config, (*target_specs, *drafter.kv_specs), num_draft_tokens, requested_len)
            if kv is None
            else _pools_of(config, kv, requested_len, target_specs, drafter)
        )
        return cls(
            config=config,
            model=model,
            drafter=drafter,
            target_specs=target_specs,
            pools=pools,
            scheduler=SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_step_tokens=config.step_tokens(num_draft_tokens),
                prefill_chunk=config.chunk,
                max_model_len=pools.max_model_len,
                num_draft_tokens=num_draft_tokens,
                lag=config.lag,
                prefix_cache=config.prefix_cache,
                tells_freed_pages=config.poison_freed_pages,
            ),
            choices=_choose_attention(config, target_specs, drafter),
            kv=kv,
            requested_len=requested_len,
        )

    @property
    def specs(self) -> tuple[KVGroupSpec, ...]:
        """Every KV group that the scheduler keeps account of."""
        return (*self.target_specs, *self.drafter.kv_specs)

    def why_eager(self) -> str | None:
        """Why cycles run kernel by kernel; None when they are captured as CUDA graphs."""
        config = self.config
        if config.device != "cuda":
            return "graphs need CUDA"
        if config.enforce_eager:
            return "enforce_eager asks for it"
        if any(choice.chosen != "triton" for choice in self.choices):
            return "the attention backend torch reads lengths back in every layer"
        return None

    def group_infos(self, specs: Sequence[KVGroupSpec]) -> list[KVGroupInfo]:
        """The groups of one rank, as clients see them."""
        return [
            KVGroupInfo(
                name=spec.name,
                num_layers=len(spec.layers),
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                window=spec.window,
                page_size=spec.page_size,
                num_pages=self.pools.num_pages[spec.name],
                page_bytes=spec.page_bytes,
            )
            for spec in specs
        ]

    def _cycles(self) -> Choice:
        why = self.why_eager()
        if why is not None:
            return Choice("cycles", "eager", why)
        return Choice("cycles", "graphs", "captured at start for every batch size that is served")

    def _kv_dtype(self) -> Choice:
        config, recipe = self.config, self.model.quantization
        means_fp8 = recipe is not None and recipe.kv_cache == FP8_E4M3
        if config.kv_dtype == "auto":
            asked = f"; the checkpoint means {FP8_E4M3}, which --kv-dtype {FP8_E4M3} serves" if means_fp8 else ""
            return Choice("KV dtype", config.dtype, f"the model's{asked}")
        own = f"; the drafter's own pages are in {config.dtype}" if self.drafter.kv_specs else ""
        return Choice("KV dtype", config.kv_dtype, f"chosen explicitly, with the checkpoint's scales or 1{own}")

    def _kv_memory(self) -> list[Choice]:
        config = self.config
        if self.kv is None or config.kv_memory_bytes is not None:
            return []
        size = f"{self.kv.target / GIB:.2f} GiB"
        if self.kv.drafter != self.kv.target:
            size += f", {self.kv.drafter / GIB:.2f} GiB for the drafter"
        if config.device == "cpu":
            return [Choice("KV memory", size, "a quarter of what was free, shared by the ranks of a host")]
        share = f"at most {config.gpu_memory_utilization:g} of a card for all that a rank holds"
        return [Choice("KV memory", size, f"what was free beside weights, work space and graphs, {share}")]

    def model_info(self) -> ModelInfo:
        """The served model, as clients see it."""
        model = self.model
        return ModelInfo(
            model_type=model.model_type,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            num_attention_heads=model.num_attention_heads,
            layer_types=[layer.kind for layer in model.layers],
            vocab_size=model.vocab_size,
            max_model_len=self.pools.max_model_len,
            max_position_embeddings=model.max_position_embeddings,
            dtype=self.config.dtype,
            numerics=self.config.numerics,
            tensor_parallel_size=self.config.tensor_parallel_size,
            sliding_window=model.sliding_window,
            choices=[
                *self.choices,
                self._cycles(),
                *self._kv_memory(),
                self._kv_dtype(),
                *_weights(self.config, model.quantization),
            ],
            drafter_method=self.drafter.traits.method,
            drafter_kv=self.drafter.traits.kv,
            drafter_placement=self.config.drafter_placement,
            num_draft_tokens=self.drafter.traits.num_draft_tokens,
            drafters=[
                DrafterInfo(
                    member.method,
                    member.kv,
                    self.config.drafter_placement,
                    member.num_draft_tokens,
                    self._identity(member.path),
                )
                for member in self.drafter.members
            ],
            checkpoint=self._identity(self.config.model_path),
            drafter_checkpoint=(
                None
                if self.config.drafter_path is None or self.drafter.traits.method == "none"
                else self._identity(self.config.drafter_path)
            ),
            prefix_cache=self.config.prefix_cache,
        )

    @property
    def widest(self) -> SchedulerConfig:
        """The limits that tables are made for: while KV memory is yet to be found, as wide as they may become."""
        return self.scheduler if self.kv is not None else replace(self.scheduler, max_model_len=self.requested_len)

    def _identity(self, path: str) -> CheckpointIdentity:
        return CheckpointIdentity.of_directory(path, has_weights=not self.config.random_weights)


def device_name(device: torch.device) -> str:
    """The card's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def place_of(rank: int, device: torch.device) -> str:
    """Where a rank computes, for errors."""
    return f"rank {rank} ({device_name(device)} on {socket.gethostname()})"


def _requested_len(config: EngineConfig, model: ModelConfig) -> int:
    requested_len = config.max_model_len or model.max_position_embeddings
    if requested_len > model.max_position_embeddings:
        raise InvalidField(
            "max_model_len",
            requested_len,
            f"2 to {model.max_position_embeddings}, the max_position_embeddings of the model's config",
        )
    return requested_len


def _usual_chunk(config: EngineConfig, model: ModelConfig, drafter: DrafterPlan) -> int:
    if config.device == "cpu":
        return LEAST_USUAL_CHUNK
    narrowed = first_narrowed(model, drafter.traits.captured_layers)
    return usual_chunk(model, narrowed, config.tensor_parallel_size)


def _pools_of(
    config: EngineConfig, kv: KVMemory, requested_len: int, target_specs: Sequence[KVGroupSpec], drafter: DrafterPlan
) -> PoolPlan:
    """As `pools_within`; too little memory is the setting's fault where `config` states it. Raises InvalidField."""
    try:
        return pools_within(config, kv, requested_len, target_specs, drafter)
    except CapacityError as error:
        stated = config.kv_memory_bytes
        if stated is None:
            raise
        raise InvalidField("kv_memory_bytes", stated, f"a size that holds a request: {error}") from error


def pools_within(
    config: EngineConfig,
    kv: KVMemory,
    requested_len: int,
    target_specs: Sequence[KVGroupSpec],
    drafter: DrafterPlan,
) -> PoolPlan:
    """Pages of every group within `kv`. A dedicated drafter has the whole KV budget of its own device for its groups.

    Raises CapacityError when not even one sequence fits.
    """
    num_draft_tokens = drafter.traits.num_draft_tokens

    def fit(specs: Sequence[KVGroupSpec], kv_memory_bytes: int, length: int) -> PoolPlan:
        return fit_pools(
            specs,
            kv_memory_bytes=kv_memory_bytes,
            requested_len=length,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.step_tokens(num_draft_tokens),
            num_draft_tokens=num_draft_tokens,
            lag=config.lag,
            # A default length must not leave room for one request at a time only.
            longest_share=0.5 if config.max_model_len is None else 1.0,
        )

    if config.drafter_placement == "colocated":
        return fit((*target_specs, *drafter.kv_specs), kv.target, requested_len)
    parts = ((target_specs, kv.target), (drafter.kv_specs, kv.drafter))
    length = min(fit(specs, num_bytes, requested_len).max_model_len for specs, num_bytes in parts)
    target, own = (fit(specs, num_bytes, length) for specs, num_bytes in parts)
    return PoolPlan(
        num_pages={**target.num_pages, **own.num_pages},
        max_model_len=length,
        num_windows=min(target.num_windows, own.num_windows),
        num_bytes=target.num_bytes,
    )


def _weights(config: EngineConfig, recipe: Recipe | None) -> list[Choice]:
    """The weights as choices, where they are quantized or not the checkpoint's."""
    told = []
    if config.random_weights:
        told.append(Choice("weights", "random", "random_weights asks for weights from a seed: answers mean nothing"))
    if recipe is not None and recipe.titles:
        rounded = "" if not recipe.activations else f" rather than in the recipe's {' and '.join(recipe.activations)}"
        told.append(
            Choice(
                "weight format",
                ", ".join(recipe.titles),
                f"the checkpoint's, by {recipe.method}: kept packed; activations are in {config.dtype}{rounded}",
            )
        )
    return told


def _choose_attention(
    config: EngineConfig, target_specs: Sequence[KVGroupSpec], drafter: DrafterPlan
) -> tuple[Choice, ...]:
    needs = AttentionNeeds(
        reader="target",
        head_dims=tuple(sorted({spec.head_dim for spec in target_specs})),
        dtype=config.dtype,
        causal=True,
    )
    return choose_backends(
        needs,
        drafter.needs,
        explicit_target=config.attention_backend,
        explicit_drafter=config.drafter_attention_backend,
        device=config.device,
    )
