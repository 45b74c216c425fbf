"""From hidden states to tokens, on the device: logits, the token of each row, accepted drafts, what is emitted.

Verification is equality: a draft is accepted iff it is the token that plain decoding would emit there.

Shape legend: C sequences that may choose tokens, K most drafts of one, J = K + 1, R = C J rows that choose, T rows of
the cycle, A sequences and the null slot, H hidden size, V vocabulary rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemray_workers.execution.cycle_rows import CycleRows, PackedRows
from gemray_workers.execution.slots import SlotTable
from gemray_workers.sampling.verify import Verified


@dataclass(frozen=True)
class VerifyRows:
    """The rows that choose a token, as a rectangle: behind a sequence's own they repeat its last one."""

    slot_CJ: Tensor
    """The null slot where nothing is chosen."""
    drafts_C: Tensor
    """Drafts of each sequence."""
    ids_CK: Tensor
    """The drafts."""
    offset_CJ: Tensor
    """0 to a sequence's number of drafts, which padding repeats."""
    row_CJ: Tensor
    """Index into T."""
    position_CJ: Tensor
    """Where the chosen token will stand."""

    @classmethod
    def of(cls, rows: CycleRows, packed: PackedRows, slots: SlotTable) -> VerifyRows:
        """The last known row of each sequence that chooses, and the rows of its drafts."""
        num_choosing, num_columns = rows.shape.num_choosing, rows.shape.max_drafts + 1
        chooses_C, drafts_C = rows.chooses_A[:num_choosing], rows.drafts_A[:num_choosing]
        slot_C = torch.where(chooses_C, rows.slot_A[:num_choosing], slots.null_slot)
        offset_CJ = torch.arange(num_columns, device=slot_C.device).minimum(drafts_C[:, None])
        last_known_C = (rows.known_A[:num_choosing] - 1).clamp(min=0)
        first_C1 = (packed.first_A[:num_choosing] + last_known_C)[:, None]
        position_CJ = (rows.start_A + rows.known_A)[:num_choosing, None] + offset_CJ
        return cls(
            slot_CJ=slot_C[:, None].expand_as(offset_CJ),
            drafts_C=drafts_C,
            ids_CK=slots.token_ids_NL[slot_C[:, None], position_CJ[:, :-1]],
            offset_CJ=offset_CJ,
            row_CJ=(first_C1 + offset_CJ).clamp(max=rows.shape.num_rows - 1),
            position_CJ=position_CJ,
        )

    def input_ids(self, slots: SlotTable) -> Tensor:
        """[C, J]: the known token that each sequence's first row computes, then its drafts."""
        newest_C1 = slots.token_ids_NL[self.slot_CJ[:, :1], (self.position_CJ[:, :1] - 1).clamp(min=0)]
        return torch.cat([newest_C1, self.ids_CK], dim=1)

    def write(self, verified: Verified, slots: SlotTable) -> None:
        """Put what verification emits into the slot table, over the drafts."""
        at = self.slot_CJ, self.position_CJ
        emitted_CJ = torch.where(verified.ids_SJ >= 0, verified.ids_SJ, slots.token_ids_NL[at])
        # Padding names a sequence's last column again, so it must bring the same value.
        slots.token_ids_NL[at] = emitted_CJ.gather(1, self.offset_CJ)

    def found(self, rows: CycleRows, verified: Verified) -> Tensor:
        """int64 [C, 2 + J], all that the host learns: drafts verified, drafts accepted, emitted ids and -1 behind."""
        chooses_C1 = rows.chooses_A[: len(self.drafts_C), None]
        counts_C2 = torch.stack([self.drafts_C, verified.num_accepted_S], dim=1)
        return torch.cat([counts_C2 * chooses_C1, verified.ids_SJ.masked_fill(~chooses_C1, NOTHING)], dim=1)


NOTHING = -2
"""In the place of a first id where a sequence had reached its end before the cycle; -1 there says unusable logits."""
