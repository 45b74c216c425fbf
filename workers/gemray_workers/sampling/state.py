"""How each slot samples, in device tensors that keep their addresses.

What a request asks for is brought to the device once, when it gets its slot; after that the choice of its tokens
(`gemray_workers.sampling.choose`) needs nothing from the host.

Memory of this rank for each slot, V being its vocabulary columns (262,144 at TP 1): 88 bytes of numbers and two bit
masks of V bits (64 KiB) from the start; counts of V int32 (1 MiB) and as much for bias (twice in float64) once a
request has had penalties or a bias. A table that was not there is allocated for all slots at once when the first
request needs it, or by `reserve`, and stays; a graph that reads it can only be captured afterwards.

Shape legend: N slots, S sequences, Q ids of a sequence, V local vocabulary columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gemray_kernels.reference.token_choice import ChoiceKernels
from gemray_kernels.slot_tables import PROMPT_SEEN, ChoiceRows, Field, SlotTables
from gemray_workers.parallel.shard_indices import ShardIndices, columns_of
from gemray_workers.sampling.features import Features
from gemray_workers.sampling.kernels import choice_kernels
from gemray_workers.sampling.masks import NOTHING_FORBIDDEN, Forbidden, MaskPool, locate
from gemray_workers.sampling.params import SamplingParams

_MASKS_PER_SLOT = 2


class SamplingState:
    """Sampling parameters of the sequences that hold slots. Every rank admits and releases the same ones."""

    def __init__(
        self,
        num_slots: int,
        shard: ShardIndices,
        dtype: torch.dtype,
        device: torch.device,
        kernels: ChoiceKernels | None = None,
    ) -> None:
        """A state without sequences; slot `num_slots` is the null slot, whose rows are padding.

        Args:
            num_slots: sequences at one time.
            shard: this rank's vocabulary.
            dtype: of logits, see `compute_dtype`.
            device: where the tables lie.
            kernels: by default those of the device and dtype.
        """
        self.shard = shard
        self.columns = columns_of(shard, device)
        self.kernels = kernels or choice_kernels(device, dtype)
        self.null_slot = num_slots
        self._dtype = dtype
        self._words_NF = torch.zeros(num_slots + 1, len(Field), dtype=torch.int64, device=device)
        self._masks = MaskPool(_MASKS_PER_SLOT * num_slots, shard, device)
        self._occurrences_NV: Tensor | None = None
        self._bias_NV: Tensor | None = None
        self._features: dict[int, Features] = {}
        self._held: dict[int, tuple[int, int]] = {}
        self._joint: Features | None = None

    @property
    def num_masks(self) -> int:
        """Different masks that sequences hold."""
        return len(self._masks)

    @property
    def features(self) -> Features:
        """What the sequences that hold slots need between them."""
        if self._joint is None:
            self._joint = Features.union(self._features.values())
        return self._joint

    def features_of(self, slots: Iterable[int]) -> Features:
        """What these sequences need between them."""
        return Features.union(self._features[slot] for slot in slots)

    def admit(self, slot: int, params: SamplingParams, token_ids: Sequence[int], prompt_len: int) -> None:
        """A sequence takes the slot: host to device once, without waiting.

        Args:
            slot: free until now.
            params: of the request.
            token_ids: prompt, and what was generated before (a replay).
            prompt_len: how many of them are the prompt.
        """
        if slot in self._features:
            raise RuntimeError(f"sampling slot {slot} is taken")
        features = Features.of(params)
        self.reserve(features)
        early, late = self._hold_masks(params)
        self._held[slot] = early, late
        self._words_NF[slot] = self._to_device(_words(params, prompt_len, early, late))
        if features.penalties:
            self._occurrences(slot, token_ids, prompt_len)
        if self._bias_NV is not None:
            # A row without a bias reads its slot's values beside one that has some.
            self._bias_NV[slot] = self._to_device(self._bias(params)) if features.bias else 0.0
        self._features[slot] = features
        self._joint = None

    def release(self, slot: int) -> None:
        """The sequence gives up the slot. Nothing on the device changes: no row names the slot until it is taken
        again, and work that is queued still finds what it was queued with."""
        for mask in self._held.pop(slot):
            self._masks.drop(mask)
        del self._features[slot]
        self._joint = None

    def reserve(self, features: Features) -> None:
        """Allocate the tables that these features read."""
        num_slots, device = len(self._words_NF), self._words_NF.device
        shape = num_slots, self.shard.num_elements_padded
        if features.penalties and self._occurrences_NV is None:
            self._occurrences_NV = torch.zeros(shape, dtype=torch.int32, device=device)
        if features.bias and self._bias_NV is None:
            self._bias_NV = torch.zeros(shape, dtype=self._dtype, device=device)

    def in_few_programs(self, features: Features) -> Features:
        """As `Features.in_few_programs`, with the tables that these read."""
        features = features.in_few_programs()
        self.reserve(features)
        return features

    def commit(self, slot_S: Tensor, ids_SQ: Tensor) -> None:
        """Count generated ids (negative ones are none) for the penalties of their sequences. On the device alone;
        to be captured with the choice where `Features.penalties` is set, and nothing where it is not."""
        if self._occurrences_NV is None:
            return
        column_SQ, is_here_SQ = self.columns.of_ids(ids_SQ)
        index_SQ = slot_S[:, None] * self._occurrences_NV.shape[1] + column_SQ
        self._occurrences_NV.view(-1).scatter_add_(0, index_SQ.flatten(), is_here_SQ.flatten().int())

    def rows(
        self, features: Features, slot_R: Tensor, position_R: Tensor, drafts_RB: Tensor | None = None
    ) -> ChoiceRows:
        """Rows that choose tokens by these features; arguments as for `choose`."""
        tables = SlotTables(
            words_NF=self._words_NF,
            masks_MW=self._masks.masks_MW if features.masks else None,
            occurrences_NV=self._occurrences_NV if features.penalties else None,
            bias_NV=self._bias_NV if features.bias else None,
        )
        drafts_RB = drafts_RB if features.penalties else None
        # Kernels read them side by side: what a caller has expanded is laid out.
        return ChoiceRows(tables, slot_R.contiguous(), position_R.contiguous(), drafts_RB)

    def _hold_masks(self, params: SamplingParams) -> tuple[int, int]:
        """(early, late): stop ids are forbidden as well until min_tokens were generated."""
        allowed, banned = params.allowed_token_ids, params.suppress_tokens
        late = self._masks.hold(Forbidden(allowed, banned))
        if not params.min_tokens:
            return NOTHING_FORBIDDEN, late
        return self._masks.hold(Forbidden(allowed, banned + params.stop_token_ids)), late

    def _occurrences(self, slot: int, token_ids: Sequence[int], prompt_len: int) -> None:
        assert self._occurrences_NV is not None
        ids = np.asarray(token_ids, dtype=np.int64)
        output, _ = locate(ids[prompt_len:], self.shard)
        row_V = np.bincount(output, minlength=self.shard.num_elements_padded).astype(np.int32)
        prompt, _ = locate(ids[:prompt_len], self.shard)
        row_V[prompt] |= PROMPT_SEEN
        self._occurrences_NV[slot] = self._to_device(row_V)

    def _bias(self, params: SamplingParams) -> NDArray[np.float64]:
        ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        values = np.fromiter(params.logit_bias.values(), dtype=np.float64)
        columns, is_here = locate(ids, self.shard)
        row_V = np.zeros(self.shard.num_elements_padded)
        row_V[columns] = values[is_here]
        return row_V

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._words_NF.device, non_blocking=True)


def _words(params: SamplingParams, prompt_len: int, early: int, late: int) -> NDArray[np.int64]:
    """One slot's entry, by `Field`."""
    words = np.zeros(len(Field), dtype=np.int64)
    numbers = words.view(np.float64)
    numbers[Field.TEMPERATURE] = params.temperature
    numbers[Field.TOP_K] = params.top_k
    numbers[Field.TOP_P] = params.top_p
    numbers[Field.MIN_P] = params.min_p
    numbers[Field.REPETITION_PENALTY] = params.repetition_penalty
    numbers[Field.PRESENCE_PENALTY] = params.presence_penalty
    numbers[Field.FREQUENCY_PENALTY] = params.frequency_penalty
    words[Field.SEED] = params.seed - 2**64 if params.seed >= 2**63 else params.seed  # the bits of a uint64
    words[Field.FREE_FROM] = prompt_len + params.min_tokens if params.min_tokens else 0
    words[Field.EARLY_MASK] = early
    words[Field.LATE_MASK] = late
    return words


def drafts_before(drafted_SQ: Tensor) -> Tensor:
    """For each row of a rectangle, the drafts of its sequence before it, [R, Q - 1]; -1 for none.

    Args:
        drafted_SQ: the rows' input ids: the first of each sequence is committed, the others are drafts.
    """
    row_Q = torch.arange(drafted_SQ.shape[1], device=drafted_SQ.device)
    is_before_QB = row_Q[1:] <= row_Q[:, None]
    return drafted_SQ[:, None, 1:].where(is_before_QB, -1).flatten(0, 1)
