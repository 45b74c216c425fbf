"""From hidden states to outcomes: logits, the token of each row, accepted drafts, log-probabilities.

Shape legend: T rows of the step, R rows that choose a token, H hidden size, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemray_workers.engine.drafts import Drafts
from gemray_workers.engine.host_copy import to_device
from gemray_workers.engine.slots import SlotTable
from gemray_workers.model.target import TargetModel
from gemray_workers.parallel.communicator import Communicator
from gemray_workers.sampling.choose import choose
from gemray_workers.sampling.logprobs import token_logprobs
from gemray_workers.sampling.verify import Accept, verify
from gemray_workers.scheduling.plan import ScheduledRows, SequenceOutcome, TokenLogprob

PROMPT_LOGPROB_ROWS = 128
"""Prompt rows whose logits are held at one time: a chunk's logits over a whole vocabulary would be gigabytes."""

NO_LOGITS = "the model gave no usable logits (NaN, or every token masked) for the next token"


class Verifier:
    """Verification is equality: a draft is accepted iff it is the token that plain decoding would emit there."""

    def __init__(self, model: TargetModel, comm: Communicator, accept: Accept = verify) -> None:
        """Over a model's logits; `accept` stands in for the rule in measurements."""
        self._model = model
        self._accept = accept
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
                num_accepted=tokens.num_accepted,
                logprobs=tokens.logprobs,
                prompt_logprobs=prompt_logprobs.get(r.slot),
                fault=tokens.fault,
            )
            for r, tokens in zip(rows, chosen, strict=True)
        ]

    def _choose(
        self, rows: Sequence[ScheduledRows], slots: SlotTable, hidden_TH: Tensor, sampled: Sequence[range]
    ) -> list[_Tokens]:
        """Each sequence's accepted drafts and next token. The host waits for the device once, to read them."""
        sampling = [(i, r) for i, r in enumerate(rows) if r.samples]
        tokens = [_Tokens() for _ in rows]
        if not sampling:
            return tokens
        index_R = to_device([t for span in sampled for t in span], hidden_TH.device)
        logits_RV = self._model.logits(hidden_TH[index_R])
        drafts = Drafts.of([r for _, r in sampling], slots)
        features = slots.sampling.features_of(r.slot for _, r in sampling)
        choice = choose(
            logits_RV,
            drafts.slot_R,
            drafts.position_R,
            slots.sampling,
            self._comm,
            features=features,
            drafts_RB=drafts.before_rows() if features.penalties else None,
        )
        verified = self._accept(drafts.ids_SK, drafts.num_S, drafts.by_sequence(choice.ids_R))
        drafts.commit(verified, slots)
        if features.penalties:
            slots.sampling.commit(drafts.slot_S1[:, 0], verified.ids_SK1)
        found = torch.cat([verified.num_accepted_S[:, None], verified.ids_SK1], dim=1).tolist()

        for (i, _), (num_accepted, *ids) in zip(sampling, found, strict=True):
            tokens[i] = _Tokens(ids[: num_accepted + 1])
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
        index_R = to_device(index, logits_RV.device)
        ids_R = to_device(ids, logits_RV.device)
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
                        to_device(ids, hidden_TH.device),
                        wanted,
                        self._model.shard,
                        self._comm,
                    )
            begin += r.num_known + r.num_drafts
        return found


class _Tokens:
    """What one sequence's rows gave: accepted drafts, then a token of the target's own."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        # Where logits were unusable the chooser says -1, which equals no draft: it can only stand last. The drafts
        # before it were accepted, so they are what a run without drafts has emitted by then.
        unusable = bool(ids) and ids[-1] < 0
        self.num_accepted = max(len(ids) - 1, 0)
        self.ids: list[int] = list(ids[:-1] if unusable else ids)
        self.fault = NO_LOGITS if unusable else None
        self.logprobs: list[TokenLogprob] | None = None


def _cut(logprob: TokenLogprob, top_n: int) -> TokenLogprob:
    return TokenLogprob(logprob.token_id, logprob.logprob, logprob.top[:top_n])
