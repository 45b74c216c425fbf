"""What a rank generates before it serves, so that what is compiled at a first use is compiled by then.

Requests run one at a time: a batch of them all would compile the kernels of the mixed batch and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typing_extensions import override

from gemray_workers.engine.inbox import LocalInbox
from gemray_workers.grammar.grammar import Grammar
from gemray_workers.messages import Stop, Submit, ToGang
from gemray_workers.rank.blueprint import Blueprint
from gemray_workers.sampling.params import SamplingParams

NUM_TOKENS = 3
_MOST_LOGPROBS = 20
_KINDS: dict[str, dict[str, object]] = {
    "defaults": {},
    "greedy": {"temperature": 0.0},
    "whole vocabulary": {"top_k": 0, "top_p": 1.0},
    "top_p": {"top_k": 0},
    "min_p": {"top_k": 0, "top_p": 1.0, "min_p": 0.05},
    "wide top_k": {"top_k": 1500, "top_p": 1.0},
    "top_k 256": {"top_k": 200},
    "top_k 1024": {"top_k": 1000},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {0: 1.0}},
    "penalties, top_p": {"top_k": 0, "presence_penalty": 0.1},
    "logprobs": {"logprobs": _MOST_LOGPROBS, "prompt_logprobs": _MOST_LOGPROBS},
}
"""What differs from the published defaults, for each part that a choice of tokens may have."""
_ANY_TEXT = Grammar(kind="regex", text="(?s:.*)")
_FORMED: dict[str, dict[str, object]] = {
    "grammar": {"grammar": _ANY_TEXT},
    "grammar, greedy": {"grammar": _ANY_TEXT, "temperature": 0.0},
}
"""As above, of answers with a form."""


def warm_up_requests(
    *,
    vocab_size: int,
    max_model_len: int,
    prefill_chunk: int,
    has_grammars: bool = False,
    methods: Sequence[str] = (),
    compiles: bool = True,
) -> list[Submit]:
    """A request for each kind of choice, then two prompts of whole chunks, one of which no graph holds.

    Args:
        vocab_size: of the target.
        max_model_len: most tokens of a request.
        prefill_chunk: most prompt rows of a step.
        has_grammars: whether the checkpoint has a vocabulary that grammars are followed by.
        methods: of the drafters; each one drafts for every kind.
        compiles: whether anything is compiled at its first use; else the defaults and a long prompt are enough to see
            that the model gives usable logits.
    """
    token_id = min(2, vocab_size - 1)
    kinds = {**_KINDS, **(_FORMED if has_grammars else {})}
    if not compiles:
        kinds = {"defaults": _KINDS["defaults"]}
    if len(methods) > 1:
        kinds = {f"{kind}, {m}": {**changes, "draft_method": m} for kind, changes in kinds.items() for m in methods}
    submits = [_request(kind, [token_id] * 2, max_model_len, changes) for kind, changes in kinds.items()]
    submits.append(_request("long prompt", [token_id] * (prefill_chunk + 2), max_model_len, {}))
    if compiles:
        # A graph's prompts may take other attention kernels than those that run kernel by kernel.
        submits.append(
            _request("long prompt, penalties", [token_id] * prefill_chunk, max_model_len, _KINDS["penalties"])
        )
    return submits


def requests_of(blueprint: Blueprint, *, has_grammars: bool = False, compiles: bool = True) -> list[Submit]:
    """The warm-up's requests of a gang; see `warm_up_requests`."""
    return warm_up_requests(
        vocab_size=blueprint.model.vocab_size,
        max_model_len=blueprint.pools.max_model_len,
        prefill_chunk=blueprint.scheduler.prefill_chunk,
        has_grammars=has_grammars,
        methods=[member.method for member in blueprint.drafter.members],
        compiles=compiles,
    )


class OneByOne(LocalInbox):
    """Hands a request over when the one before it has ended."""

    def __init__(self, submits: Iterable[Submit]) -> None:
        super().__init__([])
        self._waiting = list(submits)

    @override
    def poll(self, timeout_s: float) -> list[ToGang]:
        if self._open:
            return []
        if not self._waiting:
            return [Stop()]
        submit = self._waiting.pop(0)
        self._open.add(submit.request_id)
        return [submit]


def _request(kind: str, prompt_ids: list[int], max_model_len: int, changes: dict[str, object]) -> Submit:
    published = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "min_p": 0.0, "seed": 0}
    prompt_ids = prompt_ids[: max_model_len - 1]
    max_tokens = min(NUM_TOKENS, max_model_len - len(prompt_ids))
    params = SamplingParams(**{**published, "max_tokens": max_tokens, **changes})  # type: ignore[arg-type]
    name = f"warm-up: {kind}"  # and salt: the long prompt is to be computed whole
    return Submit(request_id=name, prompt_ids=prompt_ids, params=params, cache_salt=name)
