"""Flags that say how tokens are chosen, and who drafts them: those of `generate` and `chat`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gemray.cli.flags import with_flags
from gemray.cli.numbers import INT32_MAX, UINT64_MAX, integer, number

if TYPE_CHECKING:
    from gemray.v1 import generation_pb2 as pb

PANEL = "Choice of tokens"

MaxTokens = Annotated[
    int | None,
    integer("max_tokens", "Most tokens to generate, 0 to read the prompt alone.", least=0, most=INT32_MAX),
]
MinTokens = Annotated[
    int | None, integer("min_tokens", "No stop ends the answer before this many tokens.", least=0, most=INT32_MAX)
]
Temperature = Annotated[float | None, number("temperature", "0 is greedy.", least=0, most=100)]
TopK = Annotated[
    int | None, integer("top_k", "Choose among this many most likely tokens, 0 for all.", least=0, most=INT32_MAX)
]
TopP = Annotated[
    float | None,
    number("top_p", "Choose among the most likely tokens of this share.", least=0, most=1, excludes_least=True),
]
MinP = Annotated[
    float | None, number("min_p", "Leave out tokens below this part of the best one's probability.", least=0, most=1)
]
RepetitionPenalty = Annotated[
    float | None,
    number("repetition_penalty", "Make tokens of prompt and answer less likely, 1 does nothing.", least=0.01, most=100),
]
PresencePenalty = Annotated[
    float | None, number("presence_penalty", "Subtracted once from tokens of the answer.", least=-2, most=2)
]
FrequencyPenalty = Annotated[
    float | None, number("frequency_penalty", "Subtracted for each occurrence in the answer.", least=-2, most=2)
]
BadWord = Annotated[
    list[str] | None, typer.Option("--bad-word", metavar="TEXT", help="The answer does not hold it; may be repeated.")
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the checkpoint's own stop tokens.")]
Seed = Annotated[
    int | None,
    integer("seed", "Equal seeds give equal answers, in fast bfloat16 up to near ties.", least=0, most=UINT64_MAX),
]
DraftMethod = Annotated[
    str | None,
    typer.Option(
        "--draft-method",
        metavar="METHOD",
        help="Who drafts: none, mtp, dflash, or auto (the default), which leaves it to the server. Changes the speed "
        "alone, but for near ties of fast bfloat16.",
    ),
]
DraftTokens = Annotated[
    int | None, integer("draft_tokens", "Most drafts a step (default: the server's)", least=0, most=INT32_MAX)
]


@dataclass(frozen=True)
class Sampling:
    """What flags ask for; None and what is empty is left to the server."""

    parameters: pb.SamplingParameters
    speculation: pb.SpeculationParameters


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of its parameter `sampling`."""
    return with_flags(command, "sampling", _sampling, PANEL)


def _sampling(
    *,
    max_tokens: MaxTokens = None,
    min_tokens: MinTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    bad_word: BadWord = None,
    ignore_eos: IgnoreEos = False,
    draft_method: DraftMethod = None,
    draft_tokens: DraftTokens = None,
) -> Sampling:
    from gemray.v1 import generation_pb2 as pb

    parameters = pb.SamplingParameters(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop or [],
        bad_words=bad_word or [],
        ignore_eos=ignore_eos,
    )
    return Sampling(parameters, pb.SpeculationParameters(method=draft_method, num_draft_tokens=draft_tokens))
