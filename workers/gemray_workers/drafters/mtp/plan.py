"""From an assistant's directory to an MTP drafter."""

from __future__ import annotations

import os

import torch

from gemray_workers.attention.choice import AttentionNeeds
from gemray_workers.checkpoint.loader import check_weights
from gemray_workers.checkpoint.source import weight_source
from gemray_workers.config import EngineConfig
from gemray_workers.drafters.draft_choice import DraftChooser
from gemray_workers.drafters.mtp.assistant import AssistantModel
from gemray_workers.drafters.mtp.config import AssistantConfig
from gemray_workers.drafters.mtp.drafter import MTPDrafter
from gemray_workers.drafters.protocol import Drafter, DrafterParts, DrafterTraits
from gemray_workers.errors import InvalidField
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.model.config import LayerConfig, ModelConfig
from gemray_workers.model.kv_groups import check_tensor_parallel
from gemray_workers.parallel.communicator import SoloCommunicator
from gemray_workers.parallel.shard_indices import ShardIndices

DEFAULT_DRAFT_TOKENS = 4
"""What the published sizes accept well (spec 4.6); also the most that an adaptive length tries: every draft more is a
row more for each slot in the smallest step."""
MAX_DRAFT_TOKENS = 16
"""Steps are sequential and acceptance decays with each: more never pays."""


class MTPPlan:
    """An assistant that fits the target."""

    kv_specs: tuple[KVGroupSpec, ...] = ()
    kv_layers: tuple[LayerConfig, ...] = ()

    def __init__(self, path: str | os.PathLike[str], config: EngineConfig, target: ModelConfig) -> None:
        """Read and check the assistant's config.

        Raises:
            InvalidField: another target's assistant, or one that TP does not divide.
        """
        if config.drafter_placement == "dedicated":
            raise InvalidField(
                "drafter_placement", "dedicated", "colocated: an MTP assistant shares the target's KV cache"
            )
        self._path = path
        self._dtype = config.torch_dtype
        self._target = target
        self._fill_weights = weight_source(config)
        self._position_delta = config.mtp_position_delta
        self._assistant = AssistantConfig.from_directory(path, target, config.hf_configs)
        check_tensor_parallel(self._assistant.decoder, config.tensor_parallel_size)
        self.traits = DrafterTraits(
            method="mtp",
            path=str(path),
            kv="shared",
            num_draft_tokens=config.num_draft_tokens_within(DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS),
        )
        self.members = (self.traits,)
        self.needs = (
            AttentionNeeds(
                reader="mtp",
                head_dims=tuple(sorted({layer.head_dim for layer in self._assistant.decoder.layers})),
                dtype=config.dtype,
                causal=True,
                shares_target_kv=True,
            ),
        )

    def check_weights(self) -> None:
        """Compare the files with the assistant on one rank."""
        comm, device = SoloCommunicator(), torch.device("meta")
        shard = ShardIndices.of_rank(0, 1, org_vocab_size=self._target.org_vocab_size, num_added=self._target.num_added)
        model = AssistantModel(self._assistant, shard, comm, dtype=self._dtype, device=device)
        check_weights(self._path, model.weight_targets(), prefix="", is_ignored=model.ignored_name)

    def build(self, parts: DrafterParts) -> Drafter:
        """Load the assistant beside the target."""
        if parts.target_caches is None:
            raise RuntimeError("an MTP drafter reads the target's KV caches")
        model = AssistantModel(
            self._assistant,
            parts.shard,
            parts.comm,
            dtype=parts.dtype,
            device=parts.device,
            attention=parts.attention[0],
        )
        self._fill_weights(
            self._path,
            model.weight_targets(),
            prefix="",
            is_ignored=model.ignored_name,
            progress=parts.progress,
        )
        return MTPDrafter(
            model,
            parts.embedding,
            parts.target_caches,
            DraftChooser(parts.comm),
            num_slots=parts.num_slots,
            position_delta=self._position_delta,
        )
