"""What the rows of a batch need between them: it decides which kernels and collectives a choice consists of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gemray_kernels.slot_tables import MAX_CANDIDATES
from gemray_workers.sampling.params import SamplingParams

CANDIDATE_COUNTS = (64, 256, MAX_CANDIDATES)
"""Numbers of candidates that are looked for: the published top_k, and some room above it."""


@dataclass(frozen=True)
class Features:
    """Known to the host and equal on all ranks. More than a batch needs costs time and changes no id, so a graph
    captured for some features serves every batch whose features it `covers`. Without any, every row is greedy."""

    candidates: int = 0
    """One of `CANDIDATE_COUNTS` if a row draws from its top_k; else 0."""
    noise: bool = False
    """A row draws from the whole vocabulary."""
    min_p: bool = False
    """min_p cuts the vocabulary of such a row."""
    top_p: bool = False
    """top_p cuts it."""
    wide_top_k: bool = False
    """A top_k above `MAX_CANDIDATES` cuts it."""
    masks: bool = False
    """Some ids are forbidden."""
    penalties: bool = False
    bias: bool = False
    grammar: bool = False
    """A row has a mask of its own, made on the host for a grammar or for bad words: no graph is captured with this."""

    @classmethod
    def of(cls, params: SamplingParams) -> Features:
        """What one request needs."""
        draws = params.temperature > 0
        narrow = 0 < params.top_k <= MAX_CANDIDATES
        noise = draws and not narrow
        stops_late = params.min_tokens > 0 and params.stop_token_ids
        return cls(
            candidates=next(n for n in CANDIDATE_COUNTS if n >= params.top_k) if draws and narrow else 0,
            noise=noise,
            min_p=noise and params.min_p > 0,
            top_p=noise and params.top_p < 1,
            wide_top_k=noise and params.top_k > 0,
            masks=bool(params.suppress_tokens or params.allowed_token_ids or stops_late),
            penalties=wants_history(params),
            bias=bool(params.logit_bias),
            grammar=params.has_row_masks,
        )

    @classmethod
    def union(cls, features: Iterable[Features]) -> Features:
        """What several batches need between them."""
        joint = cls()
        for one in features:
            joint = joint | one
        return joint

    def __or__(self, other: Features) -> Features:
        return Features(
            candidates=max(self.candidates, other.candidates),
            noise=self.noise or other.noise,
            min_p=self.min_p or other.min_p,
            top_p=self.top_p or other.top_p,
            wide_top_k=self.wide_top_k or other.wide_top_k,
            masks=self.masks or other.masks,
            penalties=self.penalties or other.penalties,
            bias=self.bias or other.bias,
            grammar=self.grammar or other.grammar,
        )

    def covers(self, other: Features) -> bool:
        """Whether a choice made with these features is right for a batch that needs `other`."""
        return self | other == self

    def in_few_programs(self) -> Features:
        """More than these, so that whatever mixtures of requests there are come down to few programs: each table that
        is there or not makes another one, and one that a server compiles while it serves holds all requests up.

        Greedy batches and those of the published defaults keep their own kernels. Others look for the best of the
        whole vocabulary and for candidates, masks among it, and take penalties and bias with each other.
        """
        usual = Features(candidates=CANDIDATE_COUNTS[0], masks=True)
        if self == Features():
            return self
        if usual.covers(self):
            return usual
        edits = self.penalties or self.bias
        return replace(self | usual, noise=True, penalties=edits, bias=edits)

    @property
    def whole(self) -> bool:
        """Whether the best of the whole vocabulary is looked for; greedy rows are the first of their candidates."""
        return self.noise or not self.candidates

    @property
    def cut(self) -> bool:
        """Whether a filter must first cut the whole vocabulary."""
        return self.min_p or self.top_p or self.wide_top_k

    def of_drafts(self) -> Features:
        """What drafts are chosen by: everything but penalties and grammars. Those depend on drafts that are not decided
        yet; drafting without them costs acceptance, never ids."""
        return replace(self, penalties=False, grammar=False)


def wants_history(params: SamplingParams) -> bool:
    """Whether a request's logits depend on which ids came before (its penalties are on)."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
