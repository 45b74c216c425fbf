"""From hidden states to outcomes: logits, the token of each row, accepted drafts, log-probabilities.

Shape legend: T rows of the step, R rows that choose a token, H hidden size, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemray_workers.engine.slots import SlotTable
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.sampling.chooser import choose_tokens
from gemray_workers.sampling.logprobs import token_logprobs
from gemray_workers.sampling.rows import RowRequest, SamplingRows
from gemray_workers.sampling.verify import count_accepted
from gemray_workers.scheduling.plan import ScheduledRows, SequenceOutcome, TokenLogprob

PROMPT_LOGPROB_ROWS = 128
"""Prompt rows whose logits are held at one time: a chunk's logits over a whole vocabulary would be gigabytes."""

NO_LOGITS = "the model gave no usable logits (NaN, or every token masked) for the next token"


class Verifier:
    """Verification is equality: a draft is accepted iff it is the token that plain decoding would emit there."""

    def __init__(self, model: TargetModel, comm: Communicator) -> None:
        self._model = model
        self._comm = comm

    def verify(
        self,
        rows: Sequence[ScheduledRows],
        slots: SlotTable,
        hidden_TH: Tensor,
        *,
        sampled: Sequence[range],
        prompt: Sequence[range],
    ) -> list[SequenceOutcome]:
        """One outcome for each entry of `rows`, in order, identical on every rank.

        Args:
            rows: what was scheduled.
            slots: the sequences, drafts in place.
            hidden_TH: the target's post-norm hidden states.
            sampled: for each sequence its rows of T that choose tokens.
            prompt: for each sequence its rows of T that report prompt log-probabilities.
        """
        prompt_logprobs = self._prompt_logprobs(rows, slots, hidden_TH, prompt)
        chosen = self._choose(rows, slots, hidden_TH, sampled)
        return [
            SequenceOutcome(
                slot=r.slot,
                token_ids=tokens.ids,
                num_accepted=max(len(tokens.ids) - 1, 0),
                logprobs=tokens.logprobs,
                prompt_logprobs=prompt_logprobs.get(r.slot),
                fault=tokens.fault,
            )
            for r, tokens in zip(rows, chosen, strict=True)
        ]

    def _choose(
        self, rows: Sequence[ScheduledRows], slots: SlotTable, hidden_TH: Tensor, sampled: Sequence[range]
    ) -> list[_Tokens]:
        index_R = [t for span in sampled for t in span]
        if not index_R:
            return [_Tokens() for _ in rows]
        drafts = _drafts(rows, slots)
        logits_RV = self._model.logits(hidden_TH[torch.tensor(index_R, device=hidden_TH.device)])
        requests = [
            request
            for r, draft_ids in zip(rows, drafts, strict=True)
            if r.samples
            for request in _row_requests(r, slots, draft_ids)
        ]
        choice = choose_tokens(logits_RV, SamplingRows.build(requests, hidden_TH.device), self._model.shard, self._comm)
        # The one place where the host waits for the device.
        chosen_ids, usable = choice.ids_R.tolist(), choice.ok_R.tolist()

        tokens: list[_Tokens] = []
        first = 0
        for span, draft_ids in zip(sampled, drafts, strict=True):
            last = first + len(span)
            tokens.append(_accept(draft_ids, chosen_ids[first:last], usable[first:last]) if span else _Tokens())
            first = last
        self._add_logprobs(tokens, rows, slots, logits_RV, sampled)
        return tokens

    def _add_logprobs(
        self,
        tokens: list[_Tokens],
        rows: Sequence[ScheduledRows],
        slots: SlotTable,
        logits_RV: Tensor,
        sampled: Sequence[range],
    ) -> None:
        """Fill in the log-probabilities of emitted tokens where a request wants them."""
        wanting: list[tuple[_Tokens, int]] = []
        index: list[int] = []
        ids: list[int] = []
        top_n = first = 0
        for t, r, span in zip(tokens, rows, sampled, strict=True):
            wanted = slots[r.slot].params.logprobs
            if wanted is not None and t.ids:
                wanting.append((t, wanted))
                index += range(first, first + len(t.ids))
                ids += t.ids
                top_n = max(top_n, wanted)
            first += len(span)
        if not wanting:
            return
        index_R = torch.tensor(index, device=logits_RV.device)
        ids_R = torch.tensor(ids, device=logits_RV.device)
        found = iter(token_logprobs(logits_RV[index_R], ids_R, top_n, self._model.shard, self._comm))
        for t, wanted in wanting:
            t.logprobs = [_cut(next(found), wanted) for _ in t.ids]

    def _prompt_logprobs(
        self, rows: Sequence[ScheduledRows], slots: SlotTable, hidden_TH: Tensor, prompt: Sequence[range]
    ) -> dict[int, list[TokenLogprob]]:
        """By slot; a few rows of logits at a time."""
        found: dict[int, list[TokenLogprob]] = {}
        begin = 0
        for r, span in zip(rows, prompt, strict=True):
            sequence = slots[r.slot]
            wanted = sequence.params.prompt_logprobs
            if wanted is not None and span:
                found[r.slot] = []
                for first in range(span.start, span.stop, PROMPT_LOGPROB_ROWS):
                    last = min(first + PROMPT_LOGPROB_ROWS, span.stop)
                    after = r.start + (first - begin) + 1
                    ids = sequence.token_ids[after : after + last - first]
                    found[r.slot] += token_logprobs(
                        self._model.logits(hidden_TH[first:last]),
                        torch.tensor(ids, device=hidden_TH.device),
                        wanted,
                        self._model.shard,
                        self._comm,
                    )
            begin += r.num_known + r.num_drafts
        return found


class _Tokens:
    """What one sequence's rows gave."""

    def __init__(self, ids: list[int] | None = None, fault: str | None = None) -> None:
        self.ids = ids or []
        self.fault = fault
        self.logprobs: list[TokenLogprob] | None = None


def _accept(draft_ids: list[int], chosen_ids: list[int], usable: list[bool]) -> _Tokens:
    """Keep the leading drafts that equal the chosen tokens, then the first token that does not."""
    num_accepted = count_accepted(draft_ids, chosen_ids)
    if not all(usable[: num_accepted + 1]):
        return _Tokens(fault=NO_LOGITS)
    return _Tokens([*draft_ids[:num_accepted], chosen_ids[num_accepted]])


def _drafts(rows: Sequence[ScheduledRows], slots: SlotTable) -> list[list[int]]:
    """The drafted ids of each sequence, read back from the device in one copy when there are any."""
    if not any(r.num_drafts for r in rows):
        return [[] for _ in rows]
    widest = max(r.num_drafts for r in rows)
    starts = torch.tensor([r.start + r.num_known for r in rows], device=slots.device)
    columns_SK = starts[:, None] + torch.arange(widest, device=slots.device)
    columns_SK = columns_SK.clamp_(max=slots.token_ids_NL.shape[1] - 1)
    slot_S = torch.tensor([r.slot for r in rows], device=slots.device)
    drafts_SK = slots.token_ids_NL[slot_S[:, None], columns_SK].tolist()
    return [ids[: r.num_drafts] for ids, r in zip(drafts_SK, rows, strict=True)]


def _row_requests(r: ScheduledRows, slots: SlotTable, draft_ids: list[int]) -> list[RowRequest]:
    """Row i chooses the token after the known ones and the first i drafts."""
    sequence = slots[r.slot]
    return [
        RowRequest(
            params=sequence.params,
            position=r.start + r.num_known + i,
            prompt_len=sequence.prompt_len,
            token_ids=sequence.token_ids,
            draft_ids=draft_ids[:i],
        )
        for i in range(r.num_drafts + 1)
    ]


def _cut(logprob: TokenLogprob, top_n: int) -> TokenLogprob:
    return TokenLogprob(logprob.token_id, logprob.logprob, logprob.top[:top_n])
