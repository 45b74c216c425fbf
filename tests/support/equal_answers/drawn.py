"""Random requests, as a client might send them: prompts of every kind and any mixture of sampling fields."""

from __future__ import annotations

import json
import random

from gemray.cli.verification import PASSAGE
from gemray.v1 import generation_pb2 as pb

BEGINNINGS = (PASSAGE[:150], PASSAGE[:320], "def f(x):\n    return x\n" * 5)
"""Several prompts begin with each of these, so that a prefix cache finds something."""
TEXTS = (
    "def add(a, b):",
    "import ",
    "What is a tuple?",
    "émile ☕ 日本語 👩\u200d👩\u200d👧",
    "class Foo:\n    ",
    "The manual of the printer says",
    "\t\t",
    "x = [1, 2, 3]\n",
)
STOPS = (["\n"], ["é"], [" "], ["e", " the"], ["):"], ["return"])
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["unit", "n"],
        "additionalProperties": False,
    }
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": strict,
            "parameters": {
                "type": "object",
                "properties": {argument: schema},
                "required": [argument],
                "additionalProperties": False,
            },
        },
    }
    for name, strict, argument, schema in (
        ("heat", False, "unit", {"enum": ["C", "F"]}),
        ("say", True, "t", {"type": "string", "maxLength": 6}),
    )
]
MOST_CALL_TOKENS = 24
"""A whole call fits."""
IDS = range(5, 1000)
"""Ids of ordinary tokens."""


def drawn_request(seed: int, index: int, *, most_tokens: int) -> pb.GenerateRequest:
    """Request number `index` of those that `seed` draws, with answers of at most `most_tokens`; the same each time."""
    rng = random.Random(f"{seed}/{index}")
    request = pb.GenerateRequest(sampling=_sampling(rng, most_tokens))
    kind = rng.random()
    if kind < 0.4:
        request.text = rng.choice(BEGINNINGS) + rng.choice(TEXTS)
    elif kind < 0.6:
        request.text = rng.choice(TEXTS)
    elif kind < 0.75:
        request.token_ids.ids.extend(rng.choices(IDS, k=rng.choice((1, 2, 7, 16, 17, 64, 65, 120))))
    else:
        _give_chat(rng, request.chat)
    if kind > 0.75 and rng.random() < 0.4:
        _give_tools(rng, request)
    elif rng.random() < 0.15:
        _give_form(rng, request)
    elif kind < 0.75 and rng.random() < 0.1:  # of a chat there is nothing to echo
        request.sampling.echo = True
    return request


def _sampling(rng: random.Random, most_tokens: int) -> pb.SamplingParameters:
    drawn = pb.SamplingParameters(seed=rng.getrandbits(64), temperature=rng.choice((0.0, 0.0, 0.7, 1.0, 1.0, 1.5)))
    drawn.max_tokens = rng.choice((1, 2, 5, most_tokens // 2, most_tokens))
    if rng.random() < 0.5:
        drawn.top_k = rng.choice((0, 1, 5, 64, 200))
    if rng.random() < 0.5:
        drawn.top_p = rng.choice((0.1, 0.5, 0.9, 0.95, 1.0))
    if rng.random() < 0.2:
        drawn.min_p = rng.choice((0.01, 0.1))
    if rng.random() < 0.2:
        drawn.repetition_penalty = rng.choice((0.9, 1.1, 1.5))
    if rng.random() < 0.2:
        drawn.presence_penalty = rng.choice((-1.0, 0.5, 2.0))
    if rng.random() < 0.2:
        drawn.frequency_penalty = rng.choice((-0.5, 0.3, 1.0))
    if rng.random() < 0.15:
        drawn.logit_bias.update({rng.choice(IDS): rng.choice((-100.0, -1.5, 2.0, 5.0)) for _ in range(3)})
    if rng.random() < 0.3:
        drawn.stop.extend(rng.choice(STOPS))
    if rng.random() < 0.15:
        drawn.stop_token_ids.extend(rng.sample(IDS, 20))
    if rng.random() < 0.3:
        drawn.ignore_eos = True
    if rng.random() < 0.2:
        drawn.min_tokens = rng.randint(0, drawn.max_tokens)
    if rng.random() < 0.1:
        drawn.bad_words.extend((" the", "return"))
    elif rng.random() < 0.1:
        drawn.allowed_token_ids.extend(rng.sample(IDS, 300))
    if rng.random() < 0.7:
        drawn.logprobs = rng.choice((0, 1, 5, 20))
        drawn.logits_checksum = rng.random() < 0.6
    if rng.random() < 0.2:
        drawn.prompt_logprobs = rng.choice((0, 3))
    if rng.random() < 0.2:
        drawn.logprob_text = True
    if rng.random() < 0.1:
        drawn.n = rng.randint(2, 3)
    return drawn


def _give_chat(rng: random.Random, chat: pb.Chat) -> None:
    """A question, maybe behind other turns, maybe with a thought before its answer."""
    if rng.random() < 0.3:
        chat.messages.add(role="system", content="Be brief.")
    chat.messages.add(role="user", content=rng.choice(TEXTS) + rng.choice(("", PASSAGE[:100])))
    if rng.random() < 0.3:
        chat.messages.add(role="assistant", content="ok")
        if rng.random() < 0.5:
            chat.continue_final_message = True
        else:
            chat.messages.add(role="user", content="go on")
    if rng.random() < 0.3:
        chat.enable_thinking = True


def _give_tools(rng: random.Random, request: pb.GenerateRequest) -> None:
    """Offer functions, of which the answer may, must or must not call one."""
    chat = request.chat
    chat.continue_final_message = False
    chat.tools_json = json.dumps(TOOLS[: rng.randint(1, 2)])
    choice = rng.random()
    if choice < 0.4:
        chat.tool_choice.mode = pb.TOOL_CHOICE_MODE_REQUIRED
    elif choice < 0.6:
        chat.tool_choice.function = "heat"
    elif choice < 0.7:
        chat.tool_choice.mode = pb.TOOL_CHOICE_MODE_NONE
    if rng.random() < 0.3:
        chat.parallel_tool_calls = False
    if choice < 0.6:
        _without_contradictions(request.sampling)
        request.sampling.max_tokens = MOST_CALL_TOKENS


def _without_contradictions(sampling: pb.SamplingParameters) -> None:
    """Take back what a form could not be held beside."""
    for field in ("ignore_eos", "min_tokens", "bad_words", "allowed_token_ids", "logit_bias"):
        sampling.ClearField(field)


def _give_form(rng: random.Random, request: pb.GenerateRequest) -> None:
    _without_contradictions(request.sampling)
    if rng.random() < 0.7:
        request.structured.regex = rng.choice(("[a-z]{3,9}", "(yes|no) [0-9]+"))
    else:
        request.structured.json_schema = SCHEMA
