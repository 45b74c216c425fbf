"""Fields of both endpoints that say how tokens are chosen."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal

from gemray.openai.errors import bad_field
from gemray.openai.fields import UINT32, UINT64, Fields, check_text, is_number
from gemray.openai.lists import check_length
from gemray.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class Parameter:
    """A field that is handed on as it stands."""

    name: str
    """The same over HTTP and in SamplingParameters."""
    kind: Literal["number", "integer", "boolean"]
    is_extension: bool = False
    """Whether vLLM has it and OpenAI does not."""


PARAMETERS = (
    Parameter("temperature", "number"),
    Parameter("top_p", "number"),
    Parameter("presence_penalty", "number"),
    Parameter("frequency_penalty", "number"),
    Parameter("top_k", "integer", is_extension=True),
    Parameter("min_p", "number", is_extension=True),
    Parameter("repetition_penalty", "number", is_extension=True),
    Parameter("min_tokens", "integer", is_extension=True),
    Parameter("ignore_eos", "boolean", is_extension=True),
    Parameter("skip_special_tokens", "boolean", is_extension=True),
    Parameter("include_stop_str_in_output", "boolean", is_extension=True),
    Parameter("truncate_prompt_tokens", "integer", is_extension=True),
)

SEED_BITS = 53
"""Bits of a seed that is drawn here: JavaScript reads numbers as doubles, and the seed is to be sent again."""


def read_sampling(fields: Fields) -> pb.SamplingParameters:
    """The fields that the endpoints share; raises HttpError. Ranges are the server's to check."""
    sampling = pb.SamplingParameters()
    for parameter in PARAMETERS:
        value = getattr(fields, parameter.kind)(parameter.name)
        if value is not None:
            setattr(sampling, parameter.name, value)
    seed = fields.integer("seed", UINT64)
    sampling.seed = secrets.randbits(SEED_BITS) if seed is None else seed
    sampling.stop.extend(_read_stop(fields))
    for name in ("stop_token_ids", "allowed_token_ids"):
        getattr(sampling, name).extend(_read_ids(fields, name))
    sampling.bad_words.extend(_read_texts(fields, "bad_words"))
    for token_id, bias in _read_bias(fields).items():
        sampling.logit_bias[token_id] = bias
    return sampling


def _read_stop(fields: Fields) -> list[str]:
    stop = fields.any("stop")
    return [check_text("stop", stop)] if isinstance(stop, str) else _read_texts(fields, "stop")


def _read_texts(fields: Fields, name: str) -> list[str]:
    texts = fields.array(name) or []
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise bad_field(f"{name}[{index}]", text, "a string")
        check_text(f"{name}[{index}]", text)
    return texts


def _read_ids(fields: Fields, name: str) -> list[int]:
    return read_ids(fields.name_of(name), fields.array(name) or [])


def read_ids(param: str, ids: list[Any]) -> list[int]:
    """An array of token ids; raises HttpError."""
    for index, token_id in enumerate(ids):
        if type(token_id) is not int or not UINT32[0] <= token_id <= UINT32[1]:
            raise bad_field(f"{param}[{index}]", token_id, "a token id")
    return ids


def _read_bias(fields: Fields) -> dict[int, float]:
    bias = fields.any("logit_bias")
    if bias is None:
        return {}
    if not isinstance(bias, dict):
        raise fields.refusal("logit_bias", "an object of token ids and numbers")
    check_length("logit_bias", "logit_bias", bias)
    read = {}
    for key, value in bias.items():
        is_number_of_id = key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= UINT32[1]
        if not (is_number_of_id and key == str(int(key))):  # 07 beside 7 would be one id with two biases
            raise bad_field("logit_bias", key, "token ids as names")
        if not is_number(value):
            raise bad_field(f"logit_bias.{key}", value, "a number")
        read[int(key)] = float(value)
    return read


def read_speculation(fields: Fields) -> pb.SpeculationParameters:
    """Who drafts for the request, and how many tokens a step; raises HttpError."""
    return pb.SpeculationParameters(
        num_draft_tokens=fields.integer("num_draft_tokens"), method=fields.text("draft_method")
    )
