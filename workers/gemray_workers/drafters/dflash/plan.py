"""From a drafter's directory to a DFlash drafter."""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import replace

import torch

from gemray_workers.attention.choice import AttentionNeeds
from gemray_workers.checkpoint.index import read_index
from gemray_workers.checkpoint.loader import check_weights
from gemray_workers.checkpoint.source import weight_source
from gemray_workers.checkpoint.target import WeightTarget
from gemray_workers.config import EngineConfig
from gemray_workers.drafters.dflash.config import DFlashConfig
from gemray_workers.drafters.dflash.drafter import DFlashDrafter
from gemray_workers.drafters.dflash.model import DFlashModel
from gemray_workers.drafters.draft_choice import DraftChooser
from gemray_workers.drafters.protocol import Drafter, DrafterParts, DrafterTraits
from gemray_workers.model.config import ModelConfig
from gemray_workers.parallel.communicator import SoloCommunicator

# Names that some exporters write instead (spec 0.4).
_OTHER_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


class DFlashPlan:
    """A block drafter that fits the target."""

    def __init__(self, path: str | os.PathLike[str], config: EngineConfig, target: ModelConfig) -> None:
        """Read and check the drafter's config.

        Raises:
            InvalidField: another kind of drafter, another target's, or one that TP does not divide.
        """
        self._path = path
        self._dtype = config.torch_dtype
        self._random_weights = config.random_weights
        self._fill_weights = weight_source(config)
        self._drafter = DFlashConfig.from_directory(
            path, target, input_scale=config.dflash_input_scale, causal=config.dflash_causal
        )
        self.traits = DrafterTraits(
            method="dflash",
            path=str(path),
            kv="own",
            num_draft_tokens=config.num_draft_tokens_within(
                self._drafter.max_draft_tokens, self._drafter.max_draft_tokens
            ),
            captured_layers=self._drafter.target_layer_ids,
        )
        self.members = (self.traits,)
        self.kv_layers = self._drafter.layers
        num_ranks = config.tensor_parallel_size if config.drafter_placement == "colocated" else 1
        self.kv_specs = self._drafter.kv_group_specs(
            tp_size=num_ranks, page_size=config.page_size, dtype=config.torch_dtype
        )
        self.needs = (
            AttentionNeeds(
                reader="dflash",
                head_dims=(self._drafter.head_dim,),
                dtype=config.dtype,
                causal=all(self._drafter.causal),
            ),
        )

    def check_weights(self) -> None:
        """Compare the files with the drafter on one rank."""
        model = DFlashModel(self._drafter, SoloCommunicator(), dtype=self._dtype, device=torch.device("meta"))
        check_weights(self._path, self._targets(model), prefix="", is_ignored=self._leaves_unread)

    def build(self, parts: DrafterParts) -> Drafter:
        """Load the drafter beside the target."""
        if parts.own_caches is None:
            raise RuntimeError("a DFlash drafter needs KV pools of its own")
        model = DFlashModel(
            self._drafter, parts.comm, dtype=parts.dtype, device=parts.device, attention=parts.attention[0]
        )
        self._fill_weights(
            self._path, self._targets(model), prefix="", is_ignored=self._leaves_unread, progress=parts.progress
        )
        chooser = DraftChooser(parts.comm)
        return DFlashDrafter(model, parts.embedding, parts.head_table, parts.shard, parts.own_caches, chooser)

    def _targets(self, model: DFlashModel) -> list[WeightTarget]:
        stored = frozenset() if self._random_weights else read_index(self._path).tensors.keys()
        return [_as_stored(target, stored) for target in model.weight_targets()]

    def _leaves_unread(self, name: str) -> bool:
        recipe = self._drafter.quantization
        return recipe is not None and recipe.leaves_unread(name)


def _as_stored(target: WeightTarget, stored: Set[str]) -> WeightTarget:
    """The target under the name that a checkpoint of the tensors `stored` uses for it."""
    candidates = (target.name, f"model.{target.name}", _OTHER_NAMES.get(target.name, ""))
    return replace(target, name=next((name for name in candidates if name in stored), target.name))
