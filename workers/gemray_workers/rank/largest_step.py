"""Requests that together need the largest step a gang may have to run, and the small pools in which they find room."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gemray_workers.config import EngineConfig
from gemray_workers.kv.block_table import pages_for
from gemray_workers.kv.budget import PoolPlan
from gemray_workers.kv.spec import KVGroupSpec
from gemray_workers.messages import Submit
from gemray_workers.sampling.params import SamplingParams

NUM_TOKENS = 8
"""Tokens of each request: enough that all of them decode in one step although their prompts came in several."""
_SHORT_PROMPT = 2
DEAREST = SamplingParams(
    max_tokens=NUM_TOKENS,
    temperature=1.0,
    top_k=0,
    top_p=0.95,
    min_p=0.0,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=20,
    prompt_logprobs=20,
    seed=0,
)
"""Everything whose tables or working memory grow with the batch."""


def prompt_lengths(config: EngineConfig, num_draft_tokens: int, longest: int) -> list[int]:
    """Prompts of as many requests as may run: short ones first, then chunks that fill a step beside their decoding.

    Args:
        config: of the gang.
        num_draft_tokens: most drafts of a sequence in a step.
        longest: most tokens of a request.
    """
    chunk = max(1, min(config.chunk, longest - NUM_TOKENS))
    num_chunks = min(config.max_num_seqs, -(-config.step_tokens(num_draft_tokens) // chunk) + 1)
    short = max(1, min(_SHORT_PROMPT, longest - NUM_TOKENS))
    return [short] * (config.max_num_seqs - num_chunks) + [chunk] * num_chunks


def pools_of_largest_step(
    config: EngineConfig, specs: Sequence[KVGroupSpec], num_draft_tokens: int, longest: int
) -> PoolPlan:
    """Pools that hold all of the requests at one time. Arguments as of `prompt_lengths`, and the KV groups."""
    prompts = prompt_lengths(config, num_draft_tokens, longest)
    num_pages = {
        spec.name: sum(pages_for(prompt + NUM_TOKENS + num_draft_tokens, spec.page_size) + 1 for prompt in prompts)
        for spec in specs
    }
    return PoolPlan(
        num_pages=num_pages,
        max_model_len=max(2, min(longest, max(prompts) + NUM_TOKENS)),
        num_windows=config.max_num_seqs,
        num_bytes=sum((num_pages[spec.name] + 1) * spec.page_bytes for spec in specs),
    )


def requests_of_largest_step(
    config: EngineConfig, methods: Sequence[str], num_draft_tokens: int, longest: int
) -> list[Submit]:
    """The requests. Each prompt is computed: they have salts of their own. Arguments as of `prompt_lengths`.

    Args:
        methods: of the drafters, which take turns.
    """
    submits = []
    for i, length in enumerate(prompt_lengths(config, num_draft_tokens, longest)):
        name = f"largest step: {i}"
        method = methods[i % len(methods)] if methods else "auto"
        params = replace(DEAREST, draft_method=method, max_tokens=min(NUM_TOKENS, longest - length))
        submits.append(Submit(request_id=name, prompt_ids=[0] * length, params=params, cache_salt=name))
    return submits
