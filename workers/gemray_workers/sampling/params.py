"""How one request chooses its tokens, fully resolved: checkpoint defaults are already applied."""

from __future__ import annotations

from typing import Literal

import msgspec

from gemray_workers.grammar.grammar import Grammar

DraftMethod = Literal["auto", "none", "mtp", "dflash"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Validated by the coordinator before it reaches a rank; every field has its final value."""

    temperature: float
    """>= 0; 0 is greedy."""
    top_k: int
    """Keep the k largest (ties: smallest ids); 0 keeps all."""
    top_p: float
    """0 < top_p <= 1, over the distribution that top_k left."""
    min_p: float
    """0 <= min_p <= 1, relative to the largest probability."""
    seed: int
    """uint64: the key of the sampling noise."""
    max_tokens: int
    """>= 1: most tokens to generate."""
    min_tokens: int = 0
    """Stop ids cannot be chosen before this many tokens were generated."""
    stop_token_ids: tuple[int, ...] = ()
    """The union of the checkpoint's and the request's; empty with ignore_eos and none given."""
    repetition_penalty: float = 1.0
    """> 0; divides positive and multiplies negative logits of ids in the prompt or the output."""
    presence_penalty: float = 0.0
    """Subtracted once from ids that the output holds."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence in the output."""
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: every id is allowed."""
    suppress_tokens: tuple[int, ...] = ()
    """Never chosen (the checkpoint's generation_config)."""
    logprobs: int | None = None
    """Log-probabilities of each chosen token and of this many top tokens; None for none."""
    prompt_logprobs: int | None = None
    logits_checksum: bool = False
    """Each chosen token's log-probability has a checksum of its row's logits; `logprobs` is not None then."""
    grammar: Grammar | None = None
    """What the answer must look like."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of at least two ids that the answer does not hold."""
    num_draft_tokens: int | None = None
    """Most drafts a step; 0 turns speculation off for this request, None leaves the number to the server."""
    draft_method: DraftMethod = "auto"
    """Which of the server's drafters drafts; ``auto`` leaves it to the server."""

    @property
    def has_row_masks(self) -> bool:
        """Whether the host forbids ids anew at each token, for what was generated before it."""
        return self.grammar is not None or bool(self.bad_words)
