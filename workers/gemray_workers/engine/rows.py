"""From a step plan to the ragged rows of one forward pass.

Shape legend: T rows of all sequences, S sequences, P block-table columns, R logits rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gemray_workers.engine.host_copy import to_device
from gemray_workers.engine.slots import SlotTable
from gemray_workers.model.batch import ForwardBatch, GroupMetadata
from gemray_workers.scheduling.plan import ScheduledRows


class Span(NamedTuple):
    """Rows of one sequence, from its first uncomputed token on."""

    slot: int
    num_rows: int


def forward_batch(rows: Sequence[ScheduledRows], slots: SlotTable) -> ForwardBatch:
    """The rows that a plan schedules, known tokens and drafts. Drafts must be in the slot table already."""
    spans = [Span(r.slot, r.num_known + r.num_drafts) for r in rows]
    return lay_out(spans, slots, tuple(slots.block_tables_NP))


def lay_out(spans: Sequence[Span], slots: SlotTable, groups: Sequence[str]) -> ForwardBatch:
    """Rows of all sequences one behind the other, addressed in the KV groups named."""
    device = slots.device
    ends = torch.tensor([0, *(span.num_rows for span in spans)]).cumsum(0)
    slot_S, count_S = to_device(spans, device).unbind(1)
    start_S = slots.computed_N[slot_S]
    total = int(ends[-1])

    query_start_S1 = ends.to(torch.int32).to(device, non_blocking=True)
    sequence_T = torch.repeat_interleave(torch.arange(len(spans), device=device), count_S, output_size=total)
    offset_T = torch.arange(total, device=device) - query_start_S1[sequence_T]
    positions_T = start_S[sequence_T] + offset_T
    slot_T = slot_S[sequence_T]

    def address(group: str) -> GroupMetadata:
        table_NP, page_size = slots.block_tables_NP[group], slots.page_size[group]
        page_T = table_NP[slot_T, positions_T // page_size].long()
        return GroupMetadata(table_NP[slot_S], page_T * page_size + positions_T % page_size)

    return ForwardBatch(
        token_ids_T=slots.token_ids_NL[slot_T, positions_T],
        positions_T=positions_T,
        query_start_S1=query_start_S1,
        kv_len_S=(start_S + count_S).to(torch.int32),
        groups={group: address(group) for group in groups},
    )


def sampled_rows(rows: Sequence[ScheduledRows]) -> list[range]:
    """For each sequence, its rows (indices into T) whose logits choose tokens: the last known one and the drafts."""
    spans, end = [], 0
    for r in rows:
        end += r.num_known + r.num_drafts
        spans.append(range(end - r.num_drafts - 1, end) if r.samples else range(end, end))
    return spans


def prompt_logprob_rows(rows: Sequence[ScheduledRows], prompt_lens: Sequence[int]) -> list[range]:
    """For each sequence, its rows (indices into T) that give a wanted prompt log-probability.

    The token at prompt position p has its log-probability in the row of position p - 1.
    """
    spans, begin = [], 0
    for r, prompt_len in zip(rows, prompt_lens, strict=True):
        if r.prompt_logprobs_from is None:
            spans.append(range(begin, begin))
        else:
            first = max(r.prompt_logprobs_from, 1) - 1 - r.start
            last = min(r.start + r.num_known, prompt_len - 1) - r.start
            spans.append(range(begin + first, begin + max(first, last)))
        begin += r.num_known + r.num_drafts
    return spans
