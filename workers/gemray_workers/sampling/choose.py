"""Choosing the next token of each row: an argmax with keyed noise over a vocabulary that is split over ranks.

    token = argmax over v of  filter(logits_v / T) + g(seed, position, v),   g = 0 at T = 0

Its law is softmax of the filtered logits / T (Gumbel-max), and it depends on nothing but the row itself: not on the
batch, the number of ranks, or on whether a drafter guessed it (arXiv 2408.07978). Equal scores go to the smallest id.

What a row asks for lies in its slot's entry of `SamplingState`; the host knows shapes and `Features` alone, and reads
nothing back. So a choice can be captured in a CUDA graph as it stands, one graph for each shape and set of features,
collectives among it. What cannot be captured is `SamplingState.admit`, which brings a request to the device, and
log-probabilities, which the host reads.

Shape legend: R rows, B drafts before a row, V local vocabulary columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gemray_workers.parallel.communicator import Communicator, compute_dtype
from gemray_workers.sampling.cut import vocabulary_cut
from gemray_workers.sampling.features import Features
from gemray_workers.sampling.row_masks import RowMasks
from gemray_workers.sampling.state import SamplingState


@dataclass(frozen=True)
class ChosenTokens:
    """The tokens chosen, the same on every rank."""

    ids_R: Tensor
    """int64; -1 where the logits hold NaN or +inf, or where every id is forbidden."""

    @property
    def ok_R(self) -> Tensor:  # noqa: N802
        """bool: whether there is an id."""
        return self.ids_R >= 0


def choose(
    logits_RV: Tensor,
    slot_R: Tensor,
    position_R: Tensor,
    state: SamplingState,
    comm: Communicator,
    *,
    features: Features | None = None,
    drafts_RB: Tensor | None = None,
    row_masks: RowMasks | None = None,
    softcap: float | None = None,
) -> ChosenTokens:
    """Choose one token a row, after its slot's edits.

    One all-gather carries what each rank offers. Only rows that draw from a whole vocabulary of which min_p, top_p or a
    top_k above 1024 leaves a part need more: see `vocabulary_cut`.

    Args:
        logits_RV: this rank's local columns [R, V] before any edit; padding columns are -inf.
        slot_R: int64, each row's slot. Rows of padding name `SamplingState.null_slot`.
        position_R: int64, absolute position of the token to be chosen.
        state: of the slots.
        comm: the tensor-parallel ranks.
        features: what the batch needs, or more; by default what all sequences that hold slots need. For drafts
            `Features.of_drafts`.
        drafts_RB: int64, the drafts before each row, which it takes as accepted and which penalties must count (see
            `drafts_before`); -1 for none.
        row_masks: what single rows forbid beside their slots' masks.
        softcap: the logits are the head's bare product in any dtype, and are capped here; padding may hold anything.
    """
    expected = (len(slot_R), state.shard.num_elements_padded)
    if logits_RV.shape != expected:
        raise ValueError(f"logits are {tuple(logits_RV.shape)}, expected {expected}: rows, local vocabulary columns")
    if not len(slot_R):
        return ChosenTokens(slot_R)
    features = state.features if features is None else features
    rows = state.rows(features, slot_R, position_R, drafts_RB)
    kernels, columns = state.kernels, state.columns
    cut = None
    if features.cut or row_masks is not None:
        logits_RV = kernels.edited_logits(logits_RV, rows, columns, softcap)
        rows, softcap = rows.without_edits(), None
    if row_masks is not None:
        logits_RV = row_masks.apply(logits_RV)
    if features.cut:
        cut = vocabulary_cut(logits_RV, rows, columns, features, comm)
    offer_RW = kernels.offer(
        logits_RV,
        rows,
        columns,
        softcap=softcap,
        whole=features.whole,
        noise=features.noise,
        num_candidates=features.candidates,
        cut=cut,
    )
    ids_R = kernels.decide(
        comm.all_gather(offer_RW),
        rows,
        whole=features.whole,
        num_candidates=features.candidates,
        dtype=compute_dtype(logits_RV.dtype),
    )
    return ChosenTokens(ids_R)
