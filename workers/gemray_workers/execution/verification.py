"""From hidden states to tokens, on the device: logits, the token of each row, accepted drafts, what is emitted.

Verification is equality: a draft is accepted iff it is the token that plain decoding would emit there.

Shape legend: C sequences that may choose tokens, K most drafts of one, K1 = K + 1, R = C K1 rows that choose, T rows of
the cycle, S1 sequences and the null slot, H hidden size, V vocabulary rows of this rank.
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

    slot_CK1: Tensor
    """The null slot where nothing is chosen."""
    drafts_C: Tensor
    """Drafts of each sequence."""
    ids_CK: Tensor
    """The drafts."""
    offset_CK1: Tensor
    """0 to a sequence's number of drafts, which padding repeats."""
    row_CK1: Tensor
    """Index into T."""
    position_CK1: Tensor
    """Where the chosen token will stand."""

    @classmethod
    def of(cls, rows: CycleRows, packed: PackedRows, slots: SlotTable) -> VerifyRows:
        """The last known row of each sequence that chooses, and the rows of its drafts."""
        num_choosing, num_columns = rows.shape.num_choosing, rows.shape.max_drafts + 1
        chooses_C, drafts_C = rows.chooses_S1[:num_choosing], rows.drafts_S1[:num_choosing]
        slot_C = torch.where(chooses_C, rows.slot_S1[:num_choosing], slots.null_slot)
        offset_CK1 = torch.arange(num_columns, device=slot_C.device).minimum(drafts_C[:, None])
        last_known_C = (rows.known_S1[:num_choosing] - 1).clamp(min=0)
        first_C1 = (packed.first_S1[:num_choosing] + last_known_C)[:, None]
        position_CK1 = (rows.start_S1 + rows.known_S1)[:num_choosing, None] + offset_CK1
        return cls(
            slot_CK1=slot_C[:, None].expand_as(offset_CK1),
            drafts_C=drafts_C,
            ids_CK=slots.token_ids_NL[slot_C[:, None], position_CK1[:, :-1]],
            offset_CK1=offset_CK1,
            row_CK1=(first_C1 + offset_CK1).clamp(max=rows.shape.num_rows - 1),
            position_CK1=position_CK1,
        )

    def input_ids(self, slots: SlotTable) -> Tensor:
        """[C, K1]: the known token that each sequence's first row computes, then its drafts."""
        newest_C1 = slots.token_ids_NL[self.slot_CK1[:, :1], (self.position_CK1[:, :1] - 1).clamp(min=0)]
        return torch.cat([newest_C1, self.ids_CK], dim=1)

    def write(self, verified: Verified, slots: SlotTable) -> None:
        """Put what verification emits into the slot table, over the drafts."""
        at = self.slot_CK1, self.position_CK1
        emitted_CK1 = torch.where(verified.ids_SK1 >= 0, verified.ids_SK1, slots.token_ids_NL[at])
        # Padding names a sequence's last column again, so it must bring the same value.
        slots.token_ids_NL[at] = emitted_CK1.gather(1, self.offset_CK1)

    def found(self, rows: CycleRows, verified: Verified) -> Tensor:
        """int64 [C, 2 + K1], all that the host learns: drafts verified, drafts accepted, emitted ids and -1 behind."""
        chooses_C1 = rows.chooses_S1[: len(self.drafts_C), None]
        counts_C2 = torch.stack([self.drafts_C, verified.num_accepted_S], dim=1)
        return torch.cat([counts_C2 * chooses_C1, verified.ids_SK1.masked_fill(~chooses_C1, NOTHING)], dim=1)


NOTHING = -2
"""In the place of a first id where a sequence had reached its end before the cycle; -1 there says unusable logits."""
